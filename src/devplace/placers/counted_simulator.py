"""The counted simulator, the common currency of all placers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.errors import InputError
from devplace.machine.detect import num_cores
from devplace.placers import chains
from devplace.placers.budget import Budget
from devplace.placers.runners_up import Entry, RunnersUp, as_state, from_state
from devplace.placers.turns import placed_in_turn
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
    """Simulates placements and counts them; remembers the best.

    Args:
        threads: Threads that simulate a batch; by default as many as there are usable cores.
        progress: Called with the part of the budget spent.
        least_ns: A step time that no placement that fits can beat, if one is known.
        measure: Takes the place of simulated step times. It is called for placements within the
            memory limits only; one that fails when it runs counts as a byte over the limits.

    Attributes:
        problem: What is placed.
        budget: What may be spent.
        num_evaluations: Simulations done.
        history: (evaluations, seconds, step_ns) whenever a better feasible placement was found.
        best: The best feasible placement simulated so far.
        runners_up: Good placements of other kinds; placers set its `heading`.
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
        self._progress = progress
        self.least_ns = least_ns
        self._measure = measure
        self.problem = problem
        self.budget = budget
        self.kernel: Any = make_kernel(problem.core)
        self.num_evaluations = 0
        self.history: list[tuple[int, float, int]] = []
        self.runners_up = RunnersUp()
        self.proved_ns = 0
        self.is_infeasible = False
        self.notes: list[str] = []
        self.threads = threads or num_cores()
        self._started = time.monotonic()
        self._best: Entry | None = None
        self._ordered: Placement | None = None  # the best, if it has an order of its own
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
    def seconds(self) -> float:
        """Wall-clock time spent, s."""
        return time.monotonic() - self._started

    @property
    def exhausted(self) -> bool:
        """Whether the budget is used up."""
        limit, most = self.budget.seconds, self.budget.evaluations
        return (limit is not None and self.seconds >= limit) or (
            most is not None and self.num_evaluations >= most
        )

    @property
    def is_optimal(self) -> bool:
        """Whether the best placement so far is as fast as any can be."""
        return not self.is_measured and self._best is not None and self._best[0] <= self.least_ns

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up, or nothing better can be found."""
        return self.exhausted or self.is_optimal

    @property
    def fraction_spent(self) -> float:
        """Part of the budget used, 0 to 1; the larger of time and evaluations."""
        parts = [0.0]
        if self.budget.seconds is not None:
            parts.append(self.seconds / self.budget.seconds)
        if self.budget.evaluations is not None:
            parts.append(self.num_evaluations / self.budget.evaluations)
        return min(1.0, max(parts))

    @contextmanager
    def limited_to(self, share: float) -> Iterator[None]:
        """Let only this part of what is left of the budget be spent."""
        whole = self.budget
        seconds, most = whole.seconds, whole.evaluations
        if seconds is not None:
            now = self.seconds
            seconds = max(1e-9, now + share * (seconds - now))
        if most is not None:
            most = max(1, self.num_evaluations + int(share * (most - self.num_evaluations)))
        self.budget = Budget(seconds, most)
        try:
            yield
        finally:
            self.budget = whole

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
        self.num_evaluations += 1
        run, over = timeline.run, 0
        for peaks, limits in (
            (run.peak_bytes, self._limits),
            (run.pool_peak_bytes, self._pool_limits),
        ):
            over += int(np.maximum(peaks - limits, 0).sum())
        step = run.makespan_ns
        if self._measure is not None and over == 0:
            (found,) = self._measured(self._measure, [placement])
            step, over = (step, 1) if found is None else (found, 0)
        if over == 0 and (self._best is None or step < self._best[0]):
            self._best = (step, timeline.task_devices, None, False)
            self._ordered = placement
            self.history.append((self.num_evaluations, self.seconds, step))
        if self._progress is not None:
            self._progress(self.fraction_spent)
        return Score(step, over)

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
        count = len(devices)
        if self.budget.evaluations is not None:
            left = self.budget.evaluations - self.num_evaluations
            count = max(0, min(count, left))
        step = np.full(len(devices), np.iinfo(np.int64).max)
        overflow = step.copy()
        if count == 0:
            return step, overflow
        rows = priorities[:count] if priorities is not None and priorities.ndim == 2 else priorities
        step[:count], overflow[:count] = self.uncounted(devices[:count], rows, in_turn)
        self.num_evaluations += count
        if self._measure is not None:
            self._run(self._measure, step[:count], overflow[:count], devices, rows)
        waits = np.full(count, in_turn)
        self._remember(step[:count], overflow[:count], devices, rows, waits)
        if self._progress is not None:
            self._progress(self.fraction_spent)
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
        overflow = np.maximum(scores.peak_bytes - self._limits, 0).sum(axis=1)
        overflow += np.maximum(scores.pool_peak_bytes - self._pool_limits, 0).sum(axis=1)
        return scores.makespan_ns, overflow

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
        self.num_evaluations += int(made.sum())
        self._remember(step, overflow, groups[:, self.problem.core.tasks.group], priority, waits)
        if interrupted:
            raise KeyboardInterrupt
        if self._progress is not None:
            self._progress(self.fraction_spent)
        return [
            (groups[k].copy(), priority[k].copy(), bool(waits[k]), int(step[k]), int(overflow[k]))
            for k in range(len(step))
        ]

    @property
    def best(self) -> Placement | None:
        """The best feasible placement simulated so far, if there was one."""
        if self._best is None:
            return None
        if self._ordered is not None:
            return self._ordered
        return self._placement(self._best)

    def next_best(self, most: int) -> tuple[Placement, ...]:
        """The best feasible placements that are not `best` and differ from each other in kind."""
        found = self.runners_up.distinct(self._best, most)
        return tuple(self._placement(entry) for entry in found)

    def state_dict(self) -> dict[str, Any]:
        """What was spent and found, for checkpoints: plain lists and numbers."""
        return {
            "num_evaluations": self.num_evaluations,
            "seconds": self.seconds,
            "history": list(self.history),
            "best": None if self._best is None else as_state(self._best),
            "order": None if self._ordered is None else _order_as_state(self._ordered),
            "runners_up": self.runners_up.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict` of another evaluator of the same problem."""
        self.num_evaluations = state["num_evaluations"]
        self._started = time.monotonic() - state["seconds"]
        self.history = [(int(n), float(s), int(step)) for n, s, step in state["history"]]
        self._best = None if state["best"] is None else from_state(state["best"])
        self._ordered = None
        if self._best is not None and state.get("order") is not None:
            priority, rows = state["order"]
            of_op = None if priority is None else np.array(priority, np.int64)
            order = tuple(tuple(row) for row in rows)
            self._ordered = Placement(self.problem.expand(self._best[1]), of_op, order)
        self.runners_up.load_state_dict(state["runners_up"])

    def _run(
        self, measure: Measure, step: I64, overflow: I64, devices: I32, priorities: I64 | None
    ) -> None:
        """Put measured times in place of simulated ones; changes `step` and `overflow`."""
        own = priorities is not None and priorities.ndim == 2
        rows, placements = np.flatnonzero(overflow == 0), []
        for row in rows:
            priority = priorities[row] if own and priorities is not None else priorities
            placements.append(self._placement((0, devices[row], priority, False)))
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

    def _placement(self, entry: Entry) -> Placement:
        _, device, priority, in_turn = entry
        if in_turn and priority is not None:
            return placed_in_turn(self.problem, device, priority)
        of_op = None if priority is None else self.problem.op_priority(priority)
        return Placement(self.problem.expand(device), of_op)

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
        self.runners_up.offer(int(step[row]), devices[row], priority, bool(in_turn[row]))
        if self._best is not None and int(step[row]) >= self._best[0]:
            return
        kept = None if priority is None else priority.copy()
        self._best = (int(step[row]), devices[row].copy(), kept, bool(in_turn[row]))
        self._ordered = None
        self.history.append((self.num_evaluations, self.seconds, self._best[0]))


def _order_as_state(placement: Placement) -> list[Any]:
    assert placement.order is not None
    priority = None if placement.priority is None else placement.priority.tolist()
    return [priority, [list(row) for row in placement.order]]
