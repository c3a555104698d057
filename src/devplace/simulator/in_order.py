"""Simulate a placement in a given order: every op waits for its turn on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.graph.waiting import waiting_pair
from devplace.problem import Core, Placement, Problem, Tasks, Wires
from devplace.problem.core import pointers
from devplace.simulator.kernel import make_kernel
from devplace.simulator.timeline import Timeline, expand, priorities

I32 = NDArray[np.int32]
Ids = NDArray[np.signedinteger]
Order = Sequence[Sequence[int]]


def simulate_in_order(problem: Problem, placement: Placement, order: Order) -> Timeline:
    """Simulate one step whose devices keep to `order`, as a running plan does.

    List simulation lets a ready op overtake one that still waits. Here each op of a device hands
    an empty tensor to the next one, so none can. On a device with several streams ops may overlap:
    there the order is only a priority.

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
    core, original = _chained(problem, order)
    priority = priorities(problem, placement, device, make_kernel(problem.core))
    for streams, row in zip(problem.core.wires.streams, order, strict=True):
        if streams > 1:
            tasks = problem.core.tasks.op_task[np.array(row, np.int64)]
            priority[tasks] = np.arange(len(row), 0, -1)
    run = make_kernel(core).trace(device, priority)
    run.transfers[:, 0] = original[run.transfers[:, 0]]
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


def _turns(problem: Problem, order: Order) -> list[tuple[int, int]]:
    """Pairs of tasks that follow each other on a device with one stream."""
    task_of, streams = problem.core.tasks.op_task, problem.core.wires.streams
    return [
        (int(task_of[first]), int(task_of[second]))
        for d, row in enumerate(order)
        if streams[d] == 1
        for first, second in pairwise(row)
    ]


def _chained(problem: Problem, order: Order) -> tuple[Core, I32]:
    """The core with an empty tensor from each op to the next of its device; and the original
    carrier of each carrier (of the added ones: none, they never travel)."""
    tasks = problem.core.tasks
    follower = dict(_turns(problem, order))
    # every task gets one more carrier, read by its follower if it has one, in one more storage
    count = tasks.num_tasks
    shift_carrier, shift_storage = np.arange(count + 1), np.arange(count + 1)
    ends, store_ends = tasks.out_ptr[1:], tasks.storage_ptr[1:]
    renumber = np.arange(len(tasks.carrier_bytes)) + tasks.carrier_maker
    restore = np.arange(len(tasks.storage_bytes)) + tasks.storage_maker
    added = ends + np.arange(count)
    cons = _rows(tasks.cons_ptr, tasks.cons)
    reads = [[int(renumber[c]) for c in row] for row in _rows(tasks.in_ptr, tasks.in_carrier)]
    readers: list[list[int]] = [[] for _ in range(len(renumber) + count)]
    for carrier, row in zip(renumber, cons, strict=True):
        readers[carrier] = row
    for first, second in follower.items():
        readers[added[first]] = [second]
        reads[second].append(int(added[first]))
    cons_ptr, flat = pointers(readers)
    in_ptr, in_carrier = pointers(reads)
    chained = replace(
        tasks,
        out_ptr=(tasks.out_ptr + shift_carrier).astype(np.int32),
        storage_ptr=(tasks.storage_ptr + shift_storage).astype(np.int32),
        carrier_tensor=np.insert(tasks.carrier_tensor, ends, -1),
        carrier_bytes=np.insert(tasks.carrier_bytes, ends, 0),
        carrier_storage=_storages(tasks, renumber, restore, added),
        storage_bytes=np.insert(tasks.storage_bytes, store_ends, 0),
        storage_held=np.insert(tasks.storage_held, store_ends, 0),
        storage_over=np.insert(_over(tasks, restore), store_ends, -1),
        cons_ptr=cons_ptr,
        cons=flat,
        in_ptr=in_ptr,
        in_carrier=in_carrier,
    )
    original = np.full(len(renumber) + count, -1, np.int32)
    original[renumber] = np.arange(len(renumber))
    return Core(chained, _wider(problem.core.wires, ends)), original


def _storages(tasks: Tasks, renumber: Ids, restore: Ids, added: Ids) -> I32:
    storage = np.zeros(len(renumber) + len(added), np.int32)
    storage[renumber] = restore[tasks.carrier_storage]
    storage[added] = tasks.storage_ptr[1:] + np.arange(len(added))
    return storage


def _over(tasks: Tasks, restore: Ids) -> I32:
    over = tasks.storage_over.copy()
    over[over >= 0] = restore[over[over >= 0]]
    return over


def _wider(wires: Wires, ends: I32) -> Wires:
    def widen(table: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(np.insert(table, ends, 0, axis=1))

    return replace(
        wires,
        transfer_ns=widen(wires.transfer_ns),
        channel_ns=widen(wires.channel_ns),
        queues=widen(wires.queues),
        send_ns=widen(wires.send_ns),
        receive_ns=widen(wires.receive_ns),
    )


def _rows(ptr: I32, flat: Ids) -> list[list[int]]:
    return [flat[a:b].tolist() for a, b in pairwise(ptr.tolist())]
