"""Simulated annealing with several chains in parallel, in native code if built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devplace.placers.annealing import CoolingSchedule, MoveSpace
from devplace.placers.colocation_groups import legal
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.local_search.classes import BestPlacement, Classes
from devplace.problem import Problem

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

UNLIMITED = 2**62


class Explorer:
    """Runs chains of annealing on one problem.

    Args:
        problem: What is placed.
        evaluate: Counts what the chains simulate, and remembers what they find.
        rng: Gives the chains their seeds.
        chains: How many there are; part of the result, so the same on every machine.
    """

    def __init__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator, chains: int
    ) -> None:
        self._problem = problem
        self._evaluate = evaluate
        self._rng = rng
        self._chains = chains
        count, devices = problem.core.tasks.num_groups, len(problem.machine.devices)
        wishes = [legal(problem, np.full(count, d, np.int32)) for d in range(devices)]
        self._target = np.ascontiguousarray(np.stack(wishes, axis=1), np.int32)

    def run(
        self,
        classes: Classes,
        starts: Sequence[BestPlacement],
        devices: Sequence[int],
        until: float,
        schedule: CoolingSchedule,
    ) -> list[BestPlacement]:
        """Anneal from every start; if there are fewer than chains, again from the first ones.

        Args:
            classes: What is moved as one.
            starts: Placements to begin with.
            devices: Where classes may go.
            until: Part of the budget (0 to 1) that may be spent by the end.
            schedule: How; its limits are cut to what is left of the budget.

        Returns:
            The best placement of every chain, fastest first.
        """
        begins = [starts[k % len(starts)] for k in range(self._chains)]
        limited = self._limited(schedule, until)
        if limited is None:
            return list(starts)
        seeds = self._rng.integers(0, 2**62, self._chains)
        found = self._evaluate.anneal(
            self._space(classes, devices),
            limited,
            np.stack([best.groups for best in begins]),
            self._priorities(begins),
            np.array([best.in_turn for best in begins], np.uint8),
            seeds,
        )
        bests = [
            BestPlacement(groups, step, over, priority, in_turn)
            for groups, priority, in_turn, step, over in found
        ]
        return sorted(bests, key=lambda best: best.key)

    def _priorities(self, begins: Sequence[BestPlacement]) -> I64 | None:
        if all(best.priority is None for best in begins):
            return None
        kernel, spaces = self._evaluate.kernel, self._problem.spaces
        rows = [
            kernel.priority(spaces.tasks_from_groups(best.groups))
            if best.priority is None
            else best.priority
            for best in begins
        ]
        return np.stack(rows)

    def _limited(self, schedule: CoolingSchedule, until: float) -> CoolingSchedule | None:
        """The schedule within what the budget leaves; None if that is nothing."""
        budget = self._evaluate.meter.budget
        left = until - self._evaluate.meter.fraction_spent
        if left <= 0 or self._evaluate.is_over:
            return None
        seconds, most = schedule.seconds, schedule.most_evaluations
        if budget.seconds is not None:
            seconds = left * budget.seconds
        if budget.evaluations is not None:
            most = int(until * budget.evaluations) - self._evaluate.meter.num_evaluations
            most = min(schedule.most_evaluations, most // self._chains)
            if most < 2:
                return None
        least = self._evaluate.least_ns
        return replace(schedule, most_evaluations=most, seconds=seconds, least_ns=least)

    def _space(self, classes: Classes, devices: Sequence[int]) -> MoveSpace:
        wires, tasks = self._problem.core.wires, self._problem.core.tasks
        rank = np.argsort(np.argsort(classes.position, kind="stable"), kind="stable")
        of_group = rank[classes.of_group].astype(np.int32)
        order = np.argsort(of_group, kind="stable").astype(np.int32)
        sizes = np.bincount(of_group, minlength=classes.count)
        weight = np.zeros(classes.count)
        weight[rank] = classes.time_ns / max(1.0, float(classes.time_ns.sum()))
        return MoveSpace(
            task_group=np.ascontiguousarray(tasks.group, np.int32),
            target=self._target,
            group_class=of_group,
            class_ptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            class_groups=order,
            class_weight=weight,
            devices=np.array(devices, np.int32),
            limit_bytes=np.ascontiguousarray(wires.limit_bytes, np.int64),
            pool_limit_bytes=np.ascontiguousarray(wires.pool_limit_bytes, np.int64),
            tracks_memory=not self._evaluate.memory_cannot_bind,
        )
