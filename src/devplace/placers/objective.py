"""What is to be small."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from devplace.placers import margin_retry
from devplace.placers.budget import Budget
from devplace.placers.counted_simulator import Measure
from devplace.placers.margin_retry import Found, with_priority
from devplace.placers.placer import Placer
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.bounds import LowerBound


class Objective(Protocol):
    """What `place` makes small: a value in ns that every placement has, whoever made it.

    A new one says its name, `value` and `bound`. All else it inherits.

    Attributes:
        name: As users give it, such as `throughput`.
        label: What the value is, in tables: `max load`.
        predicted_as: Field of a plan's prediction that keeps the value; empty: none.

    Example:
        >>> class Transfers(Objective):
        ...     name, label = "transfers", "sent"
        ...     def value(self, timeline):
        ...         return sum(move.arrival_ns - move.request_ns for move in timeline.transfers)
        ...     def bound(self, problem, known):
        ...         return 0
    """

    name: str
    label: str
    predicted_as: str = ""

    def value(self, timeline: Timeline) -> int:
        """Of a placement that was simulated, ns; smaller is better."""
        ...

    def bound(self, problem: Problem, known: LowerBound) -> int:
        """No placement that fits has a smaller value, ns.

        Args:
            known: Bounds on the step time.
        """
        ...

    def refuses(self, problem: Problem, is_measured: bool) -> str:
        """Why it is not to be had; empty if it is.

        Args:
            is_measured: Whether placers learn from steps that are run.
        """
        if is_measured:
            return (
                f"A measurement times one step and cannot stand for the {self.label}: leave out "
                f"measure, or use objective='latency'."
            )
        return ""

    def search(
        self,
        problem: Problem,
        placer: Placer,
        budget: Budget,
        seed: int,
        progress: Callable[[float], None] | None,
        measure: Measure | None,
        bound: LowerBound,
    ) -> Found:
        """A placement by `placer`, which aims at the step time, and what it took."""
        found = margin_retry.search(problem, placer, budget, seed, progress, measure, bound.step_ns)
        return found if measure is not None else self.choose(found)

    def choose(self, found: Found) -> Found:
        """Of what the placer gave and remembers, the placement with the least value that fits."""
        key = (found.over_bytes, self.value(found.timeline))
        for other in found.others:
            placement = with_priority(found.timeline.problem, other)
            timeline = simulate(found.timeline.problem, placement)
            now = sum(timeline.missing_bytes.values()), self.value(timeline)
            if now < key:
                found, key = replace(found, placement=placement, timeline=timeline), now
        return found


class Latency(Objective):
    """The time of one step."""

    name, label = "latency", "step"

    def value(self, timeline: Timeline) -> int:
        """The predicted step time."""
        return timeline.makespan_ns

    def bound(self, problem: Problem, known: LowerBound) -> int:
        """`LowerBound.step_ns`."""
        return known.step_ns

    def refuses(self, problem: Problem, is_measured: bool) -> str:
        """It is always to be had."""
        return ""

    def choose(self, found: Found) -> Found:
        """What the placer gave, or of the simulated ones that are as fast the leanest."""
        if not found.timeline.is_feasible:
            return found
        placement, timeline = leanest(found.placement, found.timeline, found.runners_up)
        return replace(found, placement=placement, timeline=timeline)


LATENCY = Latency()


def leanest(
    placement: Placement, timeline: Timeline, others: Iterable[Placement]
) -> tuple[Placement, Timeline]:
    """Of a placement and others that are as fast, fit and use no more devices, the one whose
    fullest device holds least; of equal ones the first."""
    best = placement, timeline
    used = np.count_nonzero(timeline.peak_bytes)
    for other in others:
        step = simulate(timeline.problem, other)
        is_equal = step.is_feasible and step.makespan_ns == timeline.makespan_ns
        is_leaner = step.peak_bytes.max() < best[1].peak_bytes.max()
        if is_equal and is_leaner and np.count_nonzero(step.peak_bytes) <= used:
            best = with_priority(timeline.problem, other), step
    return best
