"""Measured step times for placers that learn: `place(..., measure=MeasuredSteps(...))`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from devplace.graph import as_captured
from devplace.placers.margin_retry import with_priority
from devplace.plan import make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.tune.measure import Measurement, Measurer, Trial
from devplace.tune.step_sources import Source


class MeasuredSteps:
    """Runs each placement of a captured step on the devices of this computer, and times it.

    The order of ops is the one that simulation gives, as for any plan. A placement that was run
    before is not run again. Several measurers with one `lock` get their steps ready, as far as no
    device is needed, while another one uses the devices.

    Args:
        problem: What is placed, its graph as captured, its devices those of this computer.
        sources: What the step starts from, of `step_sources`.
        measurers: What runs plans, one at a time each.

    Attributes:
        measurements: All that were made; failures tell their reason.
        predicted_ns: The simulated step time of each.
    """

    def __init__(
        self, problem: Problem, sources: Mapping[int, Source], *measurers: Measurer
    ) -> None:
        self._problem, self._sources = problem, sources
        self._graph = as_captured(problem.graph, "To measure placements")
        self._free: SimpleQueue[Measurer] = SimpleQueue()
        for measurer in measurers:
            self._free.put(measurer)
        self._threads = len(measurers)
        self._known: dict[bytes, int | None] = {}
        self.measurements: list[Measurement] = []
        self.predicted_ns: list[int] = []

    def __call__(self, placement: Placement) -> int | None:
        """Median step time, ns; None if it did not run."""
        return self.many([placement])[0]

    def many(self, placements: Sequence[Placement]) -> list[int | None]:
        """Median step time of each, ns; None of one that did not run."""
        placements = [with_priority(self._problem, placement) for placement in placements]
        keys = [_key(placement) for placement in placements]
        new = {
            key: placement
            for key, placement in zip(keys, placements, strict=True)
            if key not in self._known
        }
        with ThreadPoolExecutor(self._threads) as pool:
            made = pool.map(self._measure, new.values())
            for key, (predicted_ns, found) in zip(new, made, strict=True):
                self.predicted_ns.append(predicted_ns)
                self.measurements.append(found)
                self._known[key] = found.step_ns
        return [self._known[key] for key in keys]

    def _measure(self, placement: Placement) -> tuple[int, Measurement]:
        """The predicted step time, ns, and what running it gave."""
        assert placement.priority is not None
        timeline = simulate(self._problem, placement)
        plan = make_plan(timeline, placement.priority, {})
        trial = Trial("sample", plan, self._graph, self._sources)
        measurer = self._free.get()
        try:
            return timeline.makespan_ns, measurer.measure(trial)
        finally:
            self._free.put(measurer)


def _key(placement: Placement) -> bytes:
    assert placement.priority is not None
    order = repr(placement.order).encode()
    return placement.devices.tobytes() + placement.priority.tobytes() + order
