"""The counted simulator, the common currency of all placers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.errors import InputError
from devplace.machine.detect import num_cores
from devplace.placers import chains
from devplace.placers.budget import Budget, Meter
from devplace.placers.history import History, placement_of
from devplace.problem import Placement, Problem
from devplace.simulator import make_kernel
from devplace.simulator.in_order import simulate_in_order

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Measure = Callable[[Placement], int | None]
"""Runs a placement: its step time in ns, or None if it failed. May have `many`, for a list of
placements."""


@dataclass(frozen=True)
class Score:
    """What a placer learns about one placement.

    Attributes:
        step_ns: Predicted step time.
        overflow_bytes: Bytes over the limits, summed over devices and pools; 0 when it fits.
    """

    step_ns: int
    overflow_bytes: int

    @property
    def is_feasible(self) -> bool:
        """Whether every limit holds."""
        return self.overflow_bytes == 0

    @property
    def key(self) -> tuple[int, int]:
        """Smaller is better: first that it fits, then the time."""
        return (self.overflow_bytes, self.step_ns)


class Evaluator:
    """Simulates placements, counts them, and offers those that fit to its history.

    Args:
        threads: Threads that simulate a batch; by default as many as there are usable cores.
        progress: Called with the part of the budget spent.
        least_ns: A step time that no placement that fits can beat, if one is known.
        measure: Takes the place of simulated step times. It is called for placements within the
            memory limits only; one that fails when it runs counts as a byte over the limits.

    Attributes:
        problem: What is placed.
        meter: What may be spent, and what is.
        history: The best feasible placements simulated so far.
        proved_ns: A step time that an exact placer proved no placement that fits can beat.
        is_infeasible: Whether an exact placer proved that no placement fits.
        notes: What a placer wants the user to know.
    """

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        threads: int | None = None,
        progress: Callable[[float], None] | None = None,
        measure: Measure | None = None,
        least_ns: int = 0,
    ) -> None:
        self.least_ns = least_ns
        self._measure = measure
        self.problem = problem
        self.kernel: Any = make_kernel(problem.core)
        self.meter = Meter(budget, progress)
        self.history = History(problem, self.meter)
        self.proved_ns = 0
        self.is_infeasible = False
        self.notes: list[str] = []
        self.threads = threads or num_cores()
        tasks, wires = problem.core.tasks, problem.core.wires
        self._limits, self._pool_limits = wires.limit_bytes, wires.pool_limit_bytes
        total = int(
            tasks.storage_bytes.sum()
            + tasks.carrier_bytes.sum()
            + tasks.const_bytes.sum()
            + tasks.workspace_bytes.sum()
        )
        members = np.bincount(wires.pool[wires.pool >= 0], minlength=len(self._pool_limits))
        shares = self._pool_limits // np.maximum(members, 1)  # each member may hold a copy
        self.memory_cannot_bind = total <= min([*self._limits.tolist(), *shares.tolist()])

    @property
    def is_measured(self) -> bool:
        """Whether step times are measured instead of simulated."""
        return self._measure is not None

    @property
    def exhausted(self) -> bool:
        """Whether the budget is used up."""
        return self.meter.exhausted

    @property
    def is_optimal(self) -> bool:
        """Whether the best placement so far is as fast as any can be."""
        best_ns = self.history.best_ns
        return not self.is_measured and best_ns is not None and best_ns <= self.least_ns

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up, or nothing better can be found."""
        return self.exhausted or self.is_optimal

    def __call__(self, placement: Placement) -> Score:
        """Simulate one placement."""
        if placement.order is not None:
            return self._in_order(placement)
        priority = placement.priority
        if priority is not None:
            priority = self.problem.task_priority(priority)
        step, overflow = self.batch(self.problem.task_devices(placement)[None, :], priority)
        return Score(int(step[0]), int(overflow[0]))

    def _in_order(self, placement: Placement) -> Score:
        if self.exhausted:
            return Score(np.iinfo(np.int64).max, np.iinfo(np.int64).max)
        assert placement.order is not None
        timeline = simulate_in_order(self.problem, placement, placement.order)
        self.meter.count(1)
        step, over = timeline.run.makespan_ns, int(self._over(timeline.run))
        if self._measure is not None and over == 0:
            (found,) = self._measured(self._measure, [placement])
            step, over = (step, 1) if found is None else (found, 0)
        if over == 0:
            self.history.offer((step, timeline.task_devices, None, False), placement)
        self.meter.tell()
        return Score(step, over)

    def _over(self, run: Any) -> Any:
        """Bytes over the limits, of one run or of each of several."""
        devices = np.maximum(run.peak_bytes - self._limits, 0).sum(axis=-1)
        return devices + np.maximum(run.pool_peak_bytes - self._pool_limits, 0).sum(axis=-1)

    def batch(
        self, devices: I32, priorities: I64 | None = None, in_turn: bool = False
    ) -> tuple[I64, I64]:
        """Simulate many placements of tasks; rows over the evaluation budget are not simulated.

        Args:
            devices: Device of each task. int32 `[B, N]`
            priorities: int64 `[B, N]` or `[N]`; None: critical-path priorities of each row.
            in_turn: Whether devices keep to the priorities, and wait (see `turns`).

        Returns:
            Step times `[B]` and overflows in bytes `[B]`. A row not simulated has the largest
            integer in both.
        """
        count = self.meter.left(len(devices))
        step = np.full(len(devices), np.iinfo(np.int64).max)
        overflow = step.copy()
        if count == 0:
            return step, overflow
        rows = priorities[:count] if priorities is not None and priorities.ndim == 2 else priorities
        step[:count], overflow[:count] = self.uncounted(devices[:count], rows, in_turn)
        self.meter.count(count)
        if self._measure is not None:
            self._run(self._measure, step[:count], overflow[:count], devices, rows)
        waits = np.full(count, in_turn)
        self._remember(step[:count], overflow[:count], devices, rows, waits)
        self.meter.tell()
        return step, overflow

    def uncounted(
        self, devices: I32, priorities: I64 | None = None, in_turn: bool = False
    ) -> tuple[I64, I64]:
        """As `batch`, but neither counted nor remembered: for plans that are simpler, not shorter.

        Args:
            devices, priorities, in_turn: As of `batch`.

        Returns:
            Step times `[B]` and overflows in bytes `[B]`.
        """
        # starting threads takes longer than simulating a small graph
        threads = self.threads if devices.size >= 4000 else 1
        tracks_memory = not self.memory_cannot_bind
        scores = self.kernel.evaluate(devices, priorities, tracks_memory, threads, in_turn)
        return scores.makespan_ns, self._over(scores)

    def anneal(
        self,
        space: Any,
        settings: Any,
        starts: I32,
        priorities: I64 | None,
        in_turn: NDArray[np.uint8],
        seeds: I64,
    ) -> list[tuple[I32, I64, bool, int, int]]:
        """Let native chains anneal (see `local_search.explore`); counts and remembers as `batch`.

        Returns:
            Per chain: devices of groups `[G]`, priorities of tasks `[N]`, whether devices keep to
            these, step time, bytes over the limits.

        Raises:
            KeyboardInterrupt: Ctrl-C; what the chains had found is remembered.
        """
        if self._measure is not None:
            raise InputError(
                "A search that anneals cannot use measured step times: its moves are simulated. "
                "Use a placer that learns, or measure its best plans with confirm()."
            )
        if hasattr(self.kernel, "anneal"):
            found = self.kernel.anneal(
                space, settings, starts, priorities, in_turn, seeds, self.threads
            )
        else:
            found = chains.anneal(
                self.problem.core, space, settings, starts, priorities, in_turn, seeds
            )
        groups, priority, waits, step, overflow, made, interrupted = found
        self.meter.count(int(made.sum()))
        devices = self.problem.spaces.tasks_from_groups(groups)
        self._remember(step, overflow, devices, priority, waits)
        if interrupted:
            raise KeyboardInterrupt
        self.meter.tell()
        return [
            (groups[k].copy(), priority[k].copy(), bool(waits[k]), int(step[k]), int(overflow[k]))
            for k in range(len(step))
        ]

    def state_dict(self) -> dict[str, Any]:
        """What was spent and found, for checkpoints: plain lists and numbers."""
        spent = {"num_evaluations": self.meter.num_evaluations, "seconds": self.meter.seconds}
        return {**spent, **self.history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict` of another evaluator of the same problem."""
        self.meter.go_on(state["num_evaluations"], state["seconds"])
        self.history.load_state_dict(state)

    def _run(
        self, measure: Measure, step: I64, overflow: I64, devices: I32, priorities: I64 | None
    ) -> None:
        """Put measured times in place of simulated ones; changes `step` and `overflow`."""
        own = priorities is not None and priorities.ndim == 2
        rows, placements = np.flatnonzero(overflow == 0), []
        for row in rows:
            priority = priorities[row] if own and priorities is not None else priorities
            placements.append(placement_of(self.problem, (0, devices[row], priority, False)))
        times = self._measured(measure, placements)
        for row, found in zip(rows, times, strict=True):
            if found is None:
                overflow[row] = 1
            else:
                step[row] = found

    @staticmethod
    def _measured(measure: Measure, placements: list[Placement]) -> list[int | None]:
        many = getattr(measure, "many", None)
        return many(placements) if many else [measure(each) for each in placements]

    def _remember(
        self,
        step: I64,
        overflow: I64,
        devices: I32,
        priorities: I64 | None,
        in_turn: NDArray[np.generic],
    ) -> None:
        fits = np.flatnonzero(overflow == 0)
        if not len(fits):
            return
        row = int(fits[step[fits].argmin()])
        own = priorities is not None and priorities.ndim == 2
        priority = priorities[row] if own and priorities is not None else priorities
        self.history.offer((int(step[row]), devices[row], priority, bool(in_turn[row])))
