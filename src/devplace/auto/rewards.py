"""Measured step times for placers that learn: `place(..., measure=MeasuredSteps(...))`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from devplace.auto.measure import Measurement, Measurer, Trial
from devplace.auto.sources import Source
from devplace.placers.rounds import with_priority
from devplace.plan import make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import simulate


class MeasuredSteps:
    """Runs each placement of a captured step on the devices of this computer, and times it.

    The order of ops is the one that simulation gives, as for any plan. A placement that was run
    before is not run again. Most of a measurement is making the step ready, on one core: several
    measurers with one `lock` do that for several placements at once.

    Args:
        problem: What is placed, its graph as captured, its devices those of this computer.
        sources: What the step starts from, of `step_sources`.
        measurers: What runs plans, one at a time each.

    Attributes:
        measurements: All that were made; failures tell their reason.
    """

    def __init__(
        self, problem: Problem, sources: Mapping[int, Source], *measurers: Measurer
    ) -> None:
        self._problem, self._sources = problem, sources
        self._free: SimpleQueue[Measurer] = SimpleQueue()
        for measurer in measurers:
            self._free.put(measurer)
        self._threads = len(measurers)
        self._known: dict[bytes, int | None] = {}
        self.measurements: list[Measurement] = []

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
            for key, found in zip(new, pool.map(self._measure, new.values()), strict=True):
                self.measurements.append(found)
                self._known[key] = found.step_ns
        return [self._known[key] for key in keys]

    def _measure(self, placement: Placement) -> Measurement:
        assert placement.priority is not None
        plan = make_plan(simulate(self._problem, placement), placement.priority, {})
        measurer = self._free.get()
        try:
            return measurer.measure(Trial("sample", plan, self._problem.graph, self._sources))
        finally:
            self._free.put(measurer)


def _key(placement: Placement) -> bytes:
    assert placement.priority is not None
    order = repr(placement.order).encode()
    return placement.devices.tobytes() + placement.priority.tobytes() + order
