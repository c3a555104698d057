"""Run the best few plans of a search and take the fastest measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from devplace.auto.candidates import Candidate, candidates
from devplace.auto.measure import Measurement, Measurer, Trial
from devplace.auto.sources import step_sources
from devplace.errors import ExecutionError
from devplace.placers import Result
from devplace.plan import Plan
from devplace.run.cpu import RETRY
from devplace.units import format_time

CLEAR_LEAD = 1.1


@dataclass(frozen=True)
class Row:
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
    """

    rows: tuple[Row, ...] = field(repr=False)
    seconds: float

    @property
    def ranked(self) -> list[Row]:
        """Those that ran, fastest measured first; of equal ones the one tried first."""
        ran = [row for row in self.rows if row.measured_ns is not None]
        return sorted(ran, key=lambda row: row.measured_ns or 0)

    @property
    def best(self) -> Row:
        """The fastest measured.

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
    def best_single(self) -> Row | None:
        """The fastest measured on a single device."""
        return next((row for row in self.ranked if row.candidate.is_single), None)

    @property
    def best_several(self) -> Row | None:
        """The fastest measured on more than one device."""
        return next((row for row in self.ranked if len(row.candidate.devices) > 1), None)

    def verdict(self) -> str:
        """What was chosen and against what, in a sentence."""
        return _verdict(self.best, self.best_single, self.best_several, self.rows)

    def lines(self) -> list[str]:
        """A table of all plans: name, devices, predicted, measured, deviation."""
        rows = [("plan", "devices", "predicted", "measured", "deviation")]
        rows += [_cells(row) for row in self.rows]
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        return [
            f"{name:<{widths[0]}}  {devices:<{widths[1]}}  {predicted:>{widths[2]}}  "
            f"{measured:>9}  {deviation}".rstrip()
            for name, devices, predicted, measured, deviation in rows
        ]


def confirm(
    result: Result,
    model: Any,
    optimizer: Any,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    seconds: float = 30.0,
    measurer: Measurer | None = None,
) -> Confirmation:
    """Run a search's best few plans and the trivial ones on the devices of this computer.

    Args:
        result: Of `place`, for a captured step and devices of this computer.
        model: The model; may be on the meta device, because only times are wanted.
        optimizer: Its optimizer, or None.
        inputs: A batch, in a form that capture takes.
        kwargs: Named part of the batch.
        seconds: Time after which no more plans are tried, s.
        measurer: What runs them; by default in a child process.

    Returns:
        Every plan with what was measured; `best` is the fastest measured.

    Raises:
        PlanMismatchError, InputError: Model or batch are not those of the captured step.
    """
    graph = result.timeline.problem.graph
    sources = step_sources(graph, model, optimizer, inputs, kwargs)
    found = candidates(result)
    trials = [Trial(candidate.name, candidate.plan, graph, sources) for candidate in found]
    with Measurer() if measurer is None else nullcontext(measurer) as runner:
        return confirm_trials(found, trials, runner, seconds)


def confirm_trials(
    found: Sequence[Candidate],
    trials: Sequence[Trial],
    measurer: Measurer,
    seconds: float,
    progress: Callable[[str], None] | None = None,
) -> Confirmation:
    """Measure candidates, in their order, for at most `seconds`; see `confirm`.

    If the fastest leads by little, it and the one it is compared with are measured once more, and
    the faster time of each counts: something else may have run on the computer in between.
    """
    begin = time.monotonic()
    tell = progress or (lambda name: None)
    rows = []
    for candidate, trial in zip(found, trials, strict=True):
        tell(trial.name)
        rows.append(Row(candidate, measurer.measure(trial, begin + seconds)))
    for index in _too_close(rows):
        tell(f"{trials[index].name} again")
        again = measurer.measure(trials[index], begin + seconds)
        if again.step_ns is not None and again.step_ns < (rows[index].measured_ns or 0):
            rows[index] = Row(rows[index].candidate, again)
    return Confirmation(tuple(rows), time.monotonic() - begin)


def _too_close(rows: Sequence[Row]) -> list[int]:
    """The fastest row and its rival (the best single device, or if that is fastest the best on
    several), if it leads by less than CLEAR_LEAD; rival first."""
    ranked = Confirmation(tuple(rows), 0.0)
    if not ranked.ranked:
        return []
    best = ranked.best
    rival = ranked.best_several if best.candidate.is_single else ranked.best_single
    if rival is None or (rival.measured_ns or 0) > CLEAR_LEAD * (best.measured_ns or 0):
        return []
    return [k for row in (rival, best) for k, other in enumerate(rows) if other is row]


def _reasons(rows: Sequence[Row]) -> str:
    """Why plans did not run, each reason once."""
    names: dict[str, list[str]] = {}
    for row in rows:
        reason = row.measurement.error.removesuffix(RETRY).strip().rstrip(".")
        names.setdefault(reason, []).append(row.name)
    return "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    devices = ", ".join(row.candidate.devices)
    predicted = format_time(row.predicted_ns)
    if row.measured_ns is None:
        return row.name, devices, predicted, "-", row.measurement.error
    deviation = f"{row.deviation:+.0%}" if row.deviation is not None else "-"
    return row.name, devices, predicted, format_time(row.measured_ns), deviation


def _verdict(best: Row, single: Row | None, several: Row | None, rows: Sequence[Row]) -> str:
    took = format_time(best.measured_ns or 0)
    where = " and ".join(best.candidate.devices)
    if len(best.candidate.devices) > 1:
        if single is None:
            return f"{where} are fastest: measured {took}; no single device ran the step."
        alone = single.measured_ns or 0
        return (
            f"{where} are fastest: measured {took} against {format_time(alone)} on "
            f"{' and '.join(single.candidate.devices)} alone, "
            f"{alone / max(1, best.measured_ns or 0):.2f} times as fast."
        )
    if several is not None:
        other = format_time(several.measured_ns or 0)
        count = len(several.candidate.devices)
        return f"{where} alone is fastest: measured {took} against {other} on {count} devices."
    tried = any(len(row.candidate.devices) > 1 for row in rows)
    why = "no plan on several devices could be run" if tried else "no other plan was worth a try"
    return f"{where} alone: measured {took}; {why}."
