"""Simulated annealing over decision classes: which device for which class."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.evaluate import Evaluator
from devplace.placers.groups import legal
from devplace.problem import Problem
from devplace.simulator.critical import critical_tasks

# Rounds after which the critical path is looked at again.
REFOCUS = 50

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass
class Best:
    """The best placement seen: groups' devices with what they score.

    Attributes:
        groups: Device of each colocation group. `[G]`
        step_ns: Step time.
        overflow_bytes: Bytes over the limits.
        priority: Priorities of tasks, or None for critical-path ones. `[N]`
    """

    groups: I32
    step_ns: int
    overflow_bytes: int
    priority: I64 | None = None

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
    of_task = of_group[tasks.group]
    size = np.bincount(of_task)
    return Classes(
        of_group.astype(np.int32),
        np.bincount(of_task, time_ns).astype(np.float64),
        np.bincount(of_task, np.arange(tasks.num_tasks)) / size,
    )


class Annealer:
    """Moves classes between devices; several neighbours are simulated at once.

    Attributes:
        problem: What is placed.
        evaluate: The counted simulator.
        best: Best placement seen, over all runs.
    """

    def __init__(
        self,
        problem: Problem,
        evaluate: Evaluator,
        rng: np.random.Generator,
        best: Best,
        width: int,
    ) -> None:
        self.problem = problem
        self.evaluate = evaluate
        self.best = best
        self._rng = rng
        self._width = width
        self._group = problem.core.tasks.group
        self._free = bool(problem.allowed[:, list(problem.usable_devices)].all())
        limits = problem.core.wires.limit_bytes
        self._memory = max(1, int(limits[list(problem.usable_devices)].min()))

    def run(
        self,
        classes: Classes,
        start: I32,
        devices: list[int],
        until: float,
        heat: float,
        patience: int,
    ) -> I32:
        """Anneal from `start` until this part of the budget is spent or nothing improves.

        Args:
            classes: Decision classes.
            start: Device of each class. `[C]`
            devices: Devices to use.
            until: Part of the budget (0 to 1) at which to stop.
            heat: First temperature, as a part of the step time; it falls to exp(-6) of that.
            patience: Neighbours without improvement after which to stop.

        Returns:
            The best assignment of this run. `[C]`
        """
        begin = self.evaluate.fraction_spent
        state = start.copy()
        value = float(self._values(classes, state[None, :])[0])
        best_state, best_value, stale = state.copy(), value, 0
        weight = self._weights(classes, state)
        rounds = 0
        by_position = np.argsort(classes.position, kind="stable")
        while stale < patience and not self.evaluate.exhausted:
            spent = self.evaluate.fraction_spent
            if spent >= until:
                break
            done = (spent - begin) / max(1e-9, until - begin)
            rounds += 1
            if rounds % REFOCUS == 0:
                weight = self._weights(classes, state)
            temperature = best_value * heat * math.exp(-6.0 * done)
            neighbours = np.stack(
                [self._neighbour(state, devices, weight, by_position) for _ in range(self._width)]
            )
            for neighbour, found in zip(neighbours, self._values(classes, neighbours), strict=True):
                stale += 1
                worse = float(found) - value
                if worse > 0 and self._rng.random() >= math.exp(-worse / max(temperature, 1e-9)):
                    continue
                state, value = neighbour, float(found)
                if value < best_value * (1 - 1e-6):
                    best_state, best_value, stale = state.copy(), value, 0
                break
        return best_state

    def _weights(self, classes: Classes, state: I32) -> F64:
        """How likely each class is to be moved: by its work, and by its share of the critical
        path of this state. `[C]`"""
        weight = classes.time_ns / max(1.0, classes.time_ns.sum()) * 0.4 + 0.2 / classes.count
        groups = state[classes.of_group]
        if not self._free:
            groups = legal(self.problem, groups)
        device = groups[self._group]
        kernel = self.evaluate.kernel
        run = kernel.trace(device, kernel.priority(device))
        chain = np.array(critical_tasks(self.problem.core, device, run), np.int64)
        length = (run.finish_ns - run.start_ns)[chain]
        share = np.bincount(classes.of_group[self._group[chain]], length, classes.count)
        weight = weight + 0.4 * share / max(1.0, share.sum())
        chance: F64 = weight / weight.sum()
        return chance

    def _neighbour(self, state: I32, devices: list[int], weight: F64, by_position: I64) -> I32:
        rng, moved = self._rng, state.copy()
        kind = rng.random()
        if kind < 0.2 and len(state) > 1:
            a, b = rng.choice(len(state), 2, replace=False, p=weight)
            moved[a], moved[b] = state[b], state[a]
        elif kind < 0.3:
            length = int(rng.integers(2, max(3, len(state) // 4)))
            first = int(rng.integers(0, len(state)))
            moved[by_position[first : first + length]] = rng.choice(devices)
        elif kind < 0.45 and len(state) > 1:
            for k in rng.choice(len(state), 2, replace=False, p=weight):
                moved[k] = rng.choice(devices)
        else:
            moved[rng.choice(len(state), p=weight)] = rng.choice(devices)
        if len(devices) > 1 and np.array_equal(moved, state):
            k = rng.choice(len(state), p=weight)
            moved[k] = rng.choice([d for d in devices if d != state[k]])
        return moved

    def _values(self, classes: Classes, states: I32) -> F64:
        groups = states[:, classes.of_group]
        if not self._free:
            groups = np.stack([legal(self.problem, row) for row in groups])
        return self.values(groups)

    def values(self, groups: I32, priority: I64 | None = None) -> F64:
        """Penalised step times of group placements `[B, G]`; remembers the best. `[B]`"""
        step, overflow = self.evaluate.batch(groups[:, self._group], priority)
        for k in range(len(step)):
            found = (int(overflow[k]), int(step[k]))
            if found < self.best.key:
                row = priority[k] if priority is not None and priority.ndim == 2 else priority
                kept = None if row is None else row.copy()
                self.best = Best(groups[k].copy(), found[1], found[0], kept)
        over = overflow / self._memory
        return step * (1.0 + 2.0 * over) + (over > 0) * 0.05 * step
