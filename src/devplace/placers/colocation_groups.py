"""Helpers for placers, which decide per colocation group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


def legal(problem: Problem, wish: I32) -> I32:
    """Nearest allowed device per group: the wish where it is allowed, else the fastest allowed.

    Args:
        wish: int32 `[G]`.
    """
    allowed = problem.allowed
    rows = np.arange(len(wish))
    ok = allowed[rows, wish]
    if ok.all():
        return wish
    time = group_time_ns(problem)
    time = np.where(allowed, time, np.inf)
    return np.where(ok, wish, time.argmin(axis=1)).astype(np.int32)


def group_time_ns(problem: Problem) -> F64:
    """Time of all tasks of each group on each device. `[G, D]`"""
    tasks = problem.core.tasks
    # this runs for every neighbour that breaks a pin: bincount is 4 times as fast as np.add.at
    columns = problem.core.wires.duration_ns.T
    return np.stack([np.bincount(tasks.group, ns, tasks.num_groups) for ns in columns], axis=1)


def mean_duration_ns(problem: Problem, devices: Sequence[int] | None = None) -> F64:
    """Mean time of each task over some devices, the accelerators by default. `[N]`"""
    chosen = list(devices) if devices is not None else problem.accelerators
    mean: F64 = problem.core.wires.duration_ns[:, chosen].mean(axis=1)
    return mean


def by_vote(problem: Problem, task_wish: I32, weight: F64) -> I32:
    """Device per group from a wish per task: the one with the most weight. `[G]`"""
    tasks = problem.core.tasks
    votes = np.zeros((tasks.num_groups, len(problem.machine.devices)))
    np.add.at(votes, (tasks.group, task_wish), weight + 1e-9)
    return legal(problem, votes.argmax(axis=1).astype(np.int32))
