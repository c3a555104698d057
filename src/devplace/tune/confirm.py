"""Run the best plans of a search and take the fastest one measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from devplace.errors import ExecutionError
from devplace.graph import as_captured
from devplace.placers import Result
from devplace.plan import Plan
from devplace.run.cpu import RETRY
from devplace.tune.candidates import Candidate, of_searches
from devplace.tune.measure import Measurement, Measurer, Trial
from devplace.tune.ordinary import Ordinary, time_ordinary
from devplace.tune.step_sources import step_sources
from devplace.units import NS_PER_S, format_time

CLEAR_LEAD = 1.1
"""What is slower by more than that is not measured again."""
TIE = 1.03
"""Of plans this close to the fastest the one tried first is taken: what repeated measurements of
one plan differ by, so that a second call chooses the same."""
MAX_AGAIN = 3
"""Plans that are measured again, at most."""
PASSES = 2
_OWN_ROUNDS = 20
"""Steps for which there must be time before the user's own step is timed: it is run some times,
once while its functions are followed."""
OUT_OF_TIME = ("time limit", "not tried")
"""Kinds of measurements that say nothing of a plan."""


@dataclass(frozen=True)
class ConfirmedRow:
    """One plan, predicted and measured.

    Attributes:
        candidate: The plan and its name.
        measurement: What running it gave.
    """

    candidate: Candidate
    measurement: Measurement

    @property
    def name(self) -> str:
        """Name of the plan."""
        return self.candidate.name

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.candidate.plan

    @property
    def predicted_ns(self) -> int:
        """Predicted step time, in the plan's own order."""
        return self.candidate.predicted_ns

    @property
    def measured_ns(self) -> int | None:
        """Measured step time; None if it did not run."""
        return self.measurement.step_ns

    @property
    def spread(self) -> float | None:
        """How far its rounds lie apart, as a part of the step time; None if it did not run."""
        timing = self.measurement.timing
        if timing is None or not timing.step_ns:
            return None
        return (max(timing.round_ns) - min(timing.round_ns)) / timing.step_ns

    @property
    def deviation(self) -> float | None:
        """How far the prediction is off: predicted / measured - 1."""
        return self.predicted_ns / self.measured_ns - 1 if self.measured_ns else None

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        timing = self.measurement.timing
        return {
            "name": self.name,
            "devices": list(self.candidate.devices),
            "predicted_ns": self.predicted_ns,
            "measured_ns": self.measured_ns,
            "deviation": self.deviation,
            "spread": self.spread,
            "peak_bytes": dict(timing.peak_bytes) if timing else {},
            "mode": timing.mode if timing else "",
            "error": self.measurement.error,
        }


@dataclass(frozen=True)
class Confirmation:
    """All plans that were run, in the order they were tried.

    Attributes:
        rows: One per plan.
        seconds: Time it took, s.
        ordinary: The user's own step; None if it was not asked for.
    """

    rows: tuple[ConfirmedRow, ...] = field(repr=False)
    seconds: float
    ordinary: Ordinary | None = None

    @property
    def ranked(self) -> list[ConfirmedRow]:
        """Those that ran, fastest measured first, but before all the first tried of those that are
        within `TIE` of the fastest."""
        ran = [row for row in self.rows if row.measured_ns is not None]
        ran.sort(key=lambda row: row.measured_ns or 0)
        ties = {id(row) for row in ran if (row.measured_ns or 0) <= TIE * (ran[0].measured_ns or 0)}
        first = next((row for row in self.rows if id(row) in ties), None)
        return ran if first is None else [first, *(row for row in ran if row is not first)]

    @property
    def untimed(self) -> list[ConfirmedRow]:
        """Those for which the time was too short, best predicted first."""
        rows = [row for row in self.rows if row.measurement.kind in OUT_OF_TIME]
        return sorted(rows, key=lambda row: row.predicted_ns)

    @property
    def best(self) -> ConfirmedRow:
        """The first of `ranked`.

        Raises:
            ExecutionError: No plan ran; says why.
        """
        ranked = self.ranked
        if not ranked:
            raise ExecutionError(
                f"None of {len(self.rows)} plans could be run: {_reasons(self.rows)}. Weights and "
                f"large inputs are made up when plans are measured: if the step runs with real "
                f"ones, do not confirm plans by running."
            )
        return ranked[0]

    @property
    def best_single(self) -> ConfirmedRow | None:
        """The fastest measured on a single device."""
        return next((row for row in self.ranked if row.candidate.is_single), None)

    @property
    def best_several(self) -> ConfirmedRow | None:
        """The fastest measured on more than one device."""
        return next((row for row in self.ranked if len(row.candidate.devices) > 1), None)

    def verdict(self) -> str:
        """What was chosen and against what, in a sentence or two."""
        if not self.ranked and self.untimed:
            return "No plan was measured in time, so the best predicted one is used."
        said = _verdict(self.best, self.best_single, self.best_several, self.rows)
        return said if self.ordinary is None else f"{said} {self._beside_ordinary(self.ordinary)}"

    def _beside_ordinary(self, ordinary: Ordinary) -> str:
        said = str(ordinary)
        said = f"{said[0].upper()}{said[1:]}"
        if ordinary.timing is None or (self.best.measured_ns or 0) <= ordinary.timing.step_ns:
            return f"{said}."
        return f"{said}, which is faster than any plan: here devplace does not pay."

    def lines(self) -> list[str]:
        """A table of all plans: name, devices, predicted, measured, spread, deviation."""
        rows = [("plan", "devices", "predicted", "measured", "spread", "deviation")]
        rows += [_cells(row) for row in self.rows]
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        return [
            f"{name:<{widths[0]}}  {devices:<{widths[1]}}  {predicted:>{widths[2]}}  "
            f"{measured:>9}  {spread:>6}  {deviation}".rstrip()
            for name, devices, predicted, measured, spread, deviation in rows
        ]


def confirm(
    result: Result | Sequence[Result],
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    seconds: float = 30.0,
    measurer: Measurer | None = None,
    progress: Callable[[str], None] | None = None,
) -> Confirmation:
    """Run a search's best few plans and the trivial ones on the devices of this computer.

    Args:
        result: Of `place`, for a captured step and devices of this computer; or several, of one
            step captured with different numbers of micro-batches.
        inputs: A batch, in a form that capture takes. The model may be on the meta device, because
            only times are wanted.
        kwargs: Named part of the batch.
        seconds: Time after which no more plans are tried, s.
        measurer: What runs them; by default in a child process.
        progress: Called with the name of what is being measured.

    Returns:
        Every plan with what was measured; `best` is the fastest measured.

    Raises:
        InputError: The batch is not like the captured one, or the graph is not captured.
    """
    results = [result] if isinstance(result, Result) else result
    graphs = [as_captured(one.timeline.problem.graph, "To measure plans") for one in results]
    own = (graphs[0].model, graphs[0].optimizer, inputs, kwargs)
    steps = {id(graph): (graph, step_sources(graph, *own)) for graph in graphs}
    found = of_searches(results)
    trials = [Trial(one.name, one.plan, *steps[id(one.problem.graph)]) for one in found]
    with Measurer() if measurer is None else nullcontext(measurer) as runner:
        return confirm_trials(
            found, trials, runner, seconds, progress, lambda: time_ordinary(graphs[0], *own)
        )


def confirm_trials(
    found: Sequence[Candidate],
    trials: Sequence[Trial],
    measurer: Measurer,
    seconds: float,
    progress: Callable[[str], None] | None = None,
    ordinary: Callable[[], Ordinary] | None = None,
) -> Confirmation:
    """Measure candidates, in their order, for at most `seconds`; see `confirm`.

    Those that lead by little, and those of a speed-up that is hard to believe, are measured again
    in turn, and the fastest time of each counts: something else may have run on the computer in
    between. So is the user's own step, `ordinary`, in each turn once.
    """
    begin = time.monotonic()
    tell = progress or (lambda name: None)
    rows: list[ConfirmedRow] = []
    own: Ordinary | None = None

    def timed_own() -> Ordinary | None:
        best = min((row.measured_ns for row in rows if row.measured_ns), default=0)
        if ordinary is None or not best:
            return own
        if time.monotonic() + _OWN_ROUNDS * best / NS_PER_S > begin + seconds:
            return own or Ordinary(reason="the time was up")
        tell("the ordinary step")
        return _faster_own(own, ordinary())

    for number, (candidate, trial) in enumerate(zip(found, trials, strict=True), start=1):
        tell(trial.name)
        rows.append(ConfirmedRow(candidate, measurer.measure(trial, begin + seconds)))
        if number == min(2, len(found)):
            own = timed_own()
    for _ in range(PASSES):
        unclear = _unclear(rows)
        for index in unclear:
            tell(f"{trials[index].name} again")
            rows[index] = _faster(rows[index], measurer.measure(trials[index], begin + seconds))
        if not unclear:
            break
        own = timed_own()
    return Confirmation(tuple(rows), time.monotonic() - begin, own)


def _faster(row: ConfirmedRow, again: Measurement) -> ConfirmedRow:
    """The row with the faster time of two visits, and the rounds of both."""
    before = row.measurement.timing
    if again.timing is None or before is None:
        return row
    rounds = before.round_ns + again.timing.round_ns
    best = min(before, again.timing, key=lambda timing: timing.step_ns)
    return ConfirmedRow(
        row.candidate, replace(row.measurement, timing=replace(best, round_ns=rounds))
    )


def _faster_own(before: Ordinary | None, again: Ordinary) -> Ordinary:
    if before is None or before.timing is None or again.timing is None:
        return again
    return min(before, again, key=lambda own: own.timing.step_ns if own.timing else 0)


def _unclear(rows: Sequence[ConfirmedRow]) -> list[int]:
    """Rows to measure again: those that the fastest leads by less than CLEAR_LEAD, and the single
    device where a speed-up over it is above the number of devices; slowest first."""
    ranked = Confirmation(tuple(rows), 0.0).ranked
    if len(ranked) < 2:
        return []
    fastest = min(row.measured_ns or 0 for row in ranked)
    close = [row for row in ranked if (row.measured_ns or 0) <= CLEAR_LEAD * fastest][:MAX_AGAIN]
    single = next((row for row in ranked if row.candidate.is_single), None)
    if single is not None and not _is_credible(ranked[0], single):
        close.append(single)
    if len(close) < 2:
        return []
    return [k for row in reversed(close) for k, other in enumerate(rows) if other is row]


def _is_credible(row: ConfirmedRow, single: ConfirmedRow) -> bool:
    """Whether a plan is no more times as fast as one device than it has devices."""
    return (single.measured_ns or 0) <= len(row.candidate.devices) * (row.measured_ns or 0)


def _reasons(rows: Sequence[ConfirmedRow]) -> str:
    """Why plans did not run, each reason once."""
    names: dict[str, list[str]] = {}
    for row in rows:
        reason = row.measurement.error.removesuffix(RETRY).strip().rstrip(".")
        names.setdefault(reason, []).append(row.name)
    return "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())


def _cells(row: ConfirmedRow) -> tuple[str, str, str, str, str, str]:
    devices = ", ".join(row.candidate.devices)
    predicted = format_time(row.predicted_ns)
    if row.measured_ns is None:
        return row.name, devices, predicted, "-", "", row.measurement.error
    deviation = f"{row.deviation:+.0%}" if row.deviation is not None else "-"
    spread = f"{row.spread:.0%}" if row.spread is not None else "-"
    return row.name, devices, predicted, format_time(row.measured_ns), spread, deviation


def _verdict(
    best: ConfirmedRow,
    single: ConfirmedRow | None,
    several: ConfirmedRow | None,
    rows: Sequence[ConfirmedRow],
) -> str:
    took = format_time(best.measured_ns or 0)
    where = " and ".join(best.candidate.devices)
    if len(best.candidate.devices) > 1:
        if single is None:
            return f"{where} are fastest: measured {took}; no single device ran the step."
        alone = single.measured_ns or 0
        said = (
            f"{where} are fastest: measured {took} against {format_time(alone)} on "
            f"{' and '.join(single.candidate.devices)} alone"
        )
        if not _is_credible(best, single):
            return (
                f"{said}. That is more than {len(best.candidate.devices)} devices can gain: "
                f"something else keeps the computer busy, or one device has too little memory or "
                f"cache. No speed-up is claimed."
            )
        return f"{said}, {alone / max(1, best.measured_ns or 0):.2f} times as fast."
    if several is not None:
        other = format_time(several.measured_ns or 0)
        count = len(several.candidate.devices)
        return f"{where} alone is fastest: measured {took} against {other} on {count} devices."
    tried = any(len(row.candidate.devices) > 1 for row in rows)
    why = "no plan on several devices could be run" if tried else "no other plan was worth a try"
    return f"{where} alone: measured {took}; {why}."
