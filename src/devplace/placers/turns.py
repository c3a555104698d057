"""An order of every device as one number per task, and back.

Tasks sorted by falling number, then rising index, are in an order in which each comes after what it
reads. Whatever device each is on, devices that keep to that order, and wait where they must, come
to an end. So placements can change while the order stays.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Placement, Problem

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


def placed_in_turn(problem: Problem, task_devices: I32, turn: I64) -> Placement:
    """The placement whose devices run their tasks by falling turn.

    Args:
        task_devices: int32 `[N]`
        turn: int64 `[N]`
    """
    spaces, in_order = problem.spaces, np.argsort(-turn, kind="stable").tolist()
    order = spaces.order_of(in_order, task_devices, problem.core.num_devices)
    return Placement(spaces.op_devices(task_devices), spaces.ops_from_tasks(turn), order)


def turns_of(problem: Problem, placement: Placement) -> I64:
    """The turn of every task in the order of a placement that has one. int64 `[N]`"""
    assert placement.order is not None
    key = np.zeros(problem.core.tasks.num_tasks, np.int64)
    for row in placement.order:
        key[problem.spaces.tasks_of(row)] = np.arange(len(row))
    return turns_by(problem, key, placement.order)


def turns_by(problem: Problem, key: I64, order: tuple[tuple[int, ...], ...] = ()) -> I64:
    """Turns by rising key, then index, as far as every task comes after what it reads.

    Args:
        key: int64 `[N]`
        order: Ops that must stay in this order, device by device.

    Complexity: O((N + E) log N).
    """
    tasks = problem.core.tasks
    count, source = tasks.num_tasks, tasks.is_source.tolist()
    maker = tasks.carrier_maker[tasks.in_carrier].tolist()
    ptr, keys = tasks.in_ptr.tolist(), key.tolist()
    behind: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for task in range(count):
        for other in maker[ptr[task] : ptr[task + 1]]:
            if not source[other]:
                behind[other].append(task)
                missing[task] += 1
    for row in order:
        for first, second in pairwise(problem.spaces.tasks_of(row).tolist()):
            behind[first].append(second)
            missing[second] += 1
    turn = np.zeros(count, np.int64)
    ready = [(keys[t], t) for t in range(count) if not source[t] and not missing[t]]
    heapq.heapify(ready)
    next_turn = count
    for task in np.flatnonzero(tasks.is_source).tolist():
        turn[task] = next_turn
        next_turn -= 1
    while ready:
        task = heapq.heappop(ready)[1]
        turn[task] = next_turn
        next_turn -= 1
        for other in behind[task]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (keys[other], other))
    return turn
