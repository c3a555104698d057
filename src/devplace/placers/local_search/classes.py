"""Decision classes of the search, and the best placement seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Problem

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass
class BestPlacement:
    """The best placement seen: groups' devices with what they score.

    Attributes:
        groups: Device of each colocation group. `[G]`
        step_ns: Step time.
        overflow_bytes: Bytes over the limits.
        priority: Priorities of tasks, or None for critical-path ones. `[N]`
        in_turn: Whether devices keep to the priorities, and wait (see `placers.turns`).
    """

    groups: I32
    step_ns: int
    overflow_bytes: int
    priority: I64 | None = None
    in_turn: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Smaller is better: first that it fits, then the time."""
        return (self.overflow_bytes, self.step_ns)


@dataclass(frozen=True, eq=False)
class Classes:
    """Decision classes of one problem.

    Attributes:
        of_group: Class of each colocation group: that of its costliest task. `[G]`
        time_ns: Work in each class. `[C]`
        position: Mean position of each class's tasks in the graph; neighbours in this order are
            neighbours in the model. `[C]`
    """

    of_group: I32
    time_ns: F64
    position: F64

    @property
    def count(self) -> int:
        """Number of classes."""
        return len(self.time_ns)

    def vote(self, groups: I32, group_time: F64, num_devices: int) -> I32:
        """Device of each class: where most of its work is. `[C]`"""
        votes = np.zeros((self.count, num_devices))
        np.add.at(votes, (self.of_group, groups), group_time + 1e-9)
        device: I32 = votes.argmax(axis=1).astype(np.int32)
        return device


def make_classes(problem: Problem, of_op: I32, time_ns: F64) -> Classes:
    """Classes of groups from classes of ops; empty ones are dropped.

    Args:
        of_op: Class of each op. `[V]`
        time_ns: Mean time of each task. `[N]`
    """
    tasks = problem.core.tasks
    order = np.lexsort((-np.arange(tasks.num_tasks), time_ns))
    costliest = np.zeros(tasks.num_groups, np.int64)
    costliest[tasks.group[order]] = order
    _, of_group = np.unique(of_op[tasks.task_op[costliest]], return_inverse=True)
    of_task = problem.spaces.tasks_from_groups(of_group)
    size = np.bincount(of_task)
    return Classes(
        of_group.astype(np.int32),
        np.bincount(of_task, time_ns).astype(np.float64),
        np.bincount(of_task, np.arange(tasks.num_tasks)) / size,
    )


class Incumbent:
    """The best placement seen, over all parts of a search.

    Attributes:
        problem: What is placed.
        evaluate: The counted simulator.
        best: BestPlacement placement seen.
    """

    def __init__(self, problem: Problem, evaluate: Evaluator, best: BestPlacement) -> None:
        self.problem = problem
        self.evaluate = evaluate
        self.best = best

    def offer(self, found: BestPlacement) -> None:
        """Take a placement if it is better."""
        if found.key < self.best.key:
            self.best = found

    def try_all(self, groups: I32, priority: I64 | None = None, in_turn: bool = False) -> None:
        """Simulate placements of groups `[B, G]`, with priorities `[B, N]`, `[N]` or none."""
        devices = self.problem.spaces.tasks_from_groups(groups)
        step, overflow = self.evaluate.batch(devices, priority, in_turn)
        for k in range(len(step)):
            found = (int(overflow[k]), int(step[k]))
            if found < self.best.key:
                row = priority[k] if priority is not None and priority.ndim == 2 else priority
                kept = None if row is None else row.copy()
                self.best = BestPlacement(groups[k].copy(), found[1], found[0], kept, in_turn)
