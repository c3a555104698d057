"""Simulate a placement in a given order: every op waits for its turn on its device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.graph.waiting import waiting_pair
from devplace.problem import Placement, Problem
from devplace.simulator.kernel import make_kernel
from devplace.simulator.timeline import Timeline, expand, priorities

I32 = NDArray[np.int32]
Ids = NDArray[np.signedinteger]
Order = Sequence[Sequence[int]]


def simulate_in_order(problem: Problem, placement: Placement, order: Order) -> Timeline:
    """Simulate one step whose devices keep to `order`, as a running plan does.

    List simulation lets a ready op overtake one that still waits; here none can. On a device with
    several streams ops may overlap: there the order is only a priority.

    Args:
        problem: What is placed.
        placement: Device per op; its priorities decide only which of two transfers requested at
            the same instant is served first.
        order: Per device the indices of its ops.

    Raises:
        ProblemError: Devices cannot keep to this order (`order_fault`), or the placement does not
            fit the problem's ops and devices.
    """
    device = problem.task_devices(placement)
    fault = order_fault(problem, device, order)
    if fault:
        raise ProblemError(fault)
    kernel, tasks = make_kernel(problem.core), problem.core.tasks
    priority = priorities(problem, placement, device, kernel)
    turn = np.zeros(tasks.num_tasks, np.int64)
    for streams, row in zip(problem.core.wires.streams, order, strict=True):
        places = tasks.op_task[np.array(row, np.int64)]
        turn[places] = np.arange(len(row), 0, -1)
        if streams > 1:
            priority[places] = turn[places]
    run = kernel.trace(device, priority, turn)
    return expand(problem, device, run)


def order_fault(problem: Problem, task_devices: I32, order: Order) -> str:
    """Why devices cannot keep to an order; empty if they can.

    Args:
        problem: What is placed.
        task_devices: Device of every task. int32 `[N]`
        order: Per device the indices of its ops.

    Complexity: O(N + E).
    """
    names, ops, tasks = problem.machine.device_names, problem.graph.ops, problem.core.tasks
    try:
        order = [list(row) for row in order]
    except TypeError:
        return f"An order has one list of ops per device, got {order!r}."
    if len(order) != len(names):
        return f"An order has one list of ops per device: {len(order)} lists, {len(names)} devices."
    listed = np.zeros(len(ops), np.int64)
    for device, row in enumerate(order):
        for op in row:
            is_whole = isinstance(op, (int, np.integer)) and not isinstance(op, bool)
            if not is_whole or not 0 <= op < len(ops):
                return (
                    f"The order of {names[device]} lists op {op!r}: ops are whole numbers from 0 "
                    f"to {len(ops) - 1}."
                )
            listed[op] += 1
    due = np.zeros(len(ops), np.int64)
    due[tasks.task_op[tasks.is_source == 0]] = 1
    for wrong in np.flatnonzero(listed != due):
        return (
            f"Every op must be in one order, sources and views in none: {ops[wrong].name!r} "
            f"is listed {listed[wrong]} times. Make the order again."
        )
    for device, row in enumerate(order):
        for op in row:
            if task_devices[tasks.op_task[op]] != device:
                return (
                    f"The order of {names[device]} lists {ops[op].name!r}, which is not placed "
                    f"there. Make the order again."
                )
    waiting = waiting_ops(problem, order)
    if waiting is None:
        return ""
    consumer, producer = (ops[op].name for op in waiting)
    return (
        f"The order can never finish: {consumer!r} waits for {producer!r}, which in turn waits "
        f"for it. Order every op after the ops it reads."
    )


def waiting_ops(problem: Problem, order: Order) -> tuple[int, int] | None:
    """Two ops that wait for each other in this order, as `waiting_pair` gives them; else None."""
    tasks = problem.core.tasks
    reads = _rows(tasks.in_ptr, tasks.carrier_maker[tasks.in_carrier])
    rows = [tasks.op_task[np.array(row, np.int64)].tolist() for row in order]
    found = waiting_pair(reads, rows)
    if found is None:
        return None
    consumer, producer = found
    return int(tasks.task_op[consumer]), int(tasks.task_op[producer])


def _rows(ptr: I32, flat: Ids) -> list[list[int]]:
    return [flat[a:b].tolist() for a, b in pairwise(ptr.tolist())]
