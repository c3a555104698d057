"""Measured step times for placers that learn: `place(..., measure=MeasuredSteps(...))`."""

from __future__ import annotations

from collections.abc import Mapping

from devplace.auto.measure import Measurement, Measurer, Trial
from devplace.auto.sources import Source
from devplace.placers.rounds import with_priority
from devplace.plan import make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import simulate


class MeasuredSteps:
    """Runs each placement of a captured step on the devices of this computer, and times it.

    The order of ops is the one that simulation gives, as for any plan. A placement that was run
    before is not run again.

    Args:
        problem: What is placed, its graph as captured, its devices those of this computer.
        sources: What the step starts from, of `step_sources`.
        measurer: What runs plans.

    Attributes:
        measurements: All that were made, in order; failures tell their reason.
    """

    def __init__(self, problem: Problem, sources: Mapping[int, Source], measurer: Measurer) -> None:
        self._problem, self._sources, self._measurer = problem, sources, measurer
        self._known: dict[bytes, int | None] = {}
        self.measurements: list[Measurement] = []

    def __call__(self, placement: Placement) -> int | None:
        """Median step time, ns; None if it did not run."""
        placement = with_priority(self._problem, placement)
        assert placement.priority is not None
        key = placement.devices.tobytes() + placement.priority.tobytes()
        if key not in self._known:
            timeline = simulate(self._problem, placement)
            plan = make_plan(timeline, placement.priority, {})
            name = f"sample {len(self.measurements)}"
            trial = Trial(name, plan, self._problem.graph, self._sources)
            self.measurements.append(self._measurer.measure(trial))
            self._known[key] = self.measurements[-1].step_ns
        return self._known[key]
