"""Predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devplace.simulator import Timeline
from devplace.units import format_time

if TYPE_CHECKING:
    from devplace.run.measured_timeline import MeasuredTimeline


def not_observed(timeline: Timeline, measured: MeasuredTimeline) -> list[str]:
    """Names of planned ops that the device they were planned on did not report as run."""
    ops = (op for row in timeline.order for op in row)
    return [timeline.problem.graph.ops[op].name for op in sorted(ops) if measured.start_ns[op] < 0]


def measured_summary(timeline: Timeline, measured: MeasuredTimeline) -> str:
    """Step and busy time per device, predicted and measured, and ops that were not seen."""
    lines = [("step", *_pair(timeline.makespan_ns, measured.makespan_ns))]
    spent = measured.finish_ns - measured.start_ns
    for d, ops in enumerate(timeline.order):
        if ops:
            name = f"{timeline.problem.machine.device_names[d]} busy"
            lines.append((name, *_pair(int(timeline.busy_ns[d]), int(spent[list(ops)].sum()))))
    width = max(len(line[0]) for line in lines)
    text = [
        f"{name:<{width}}  {planned:>8} predicted  {seen:>8} measured  {error:>6}"
        for name, planned, seen, error in lines
    ]
    missing = not_observed(timeline, measured)
    if missing:
        text.append(f"{len(missing)} ops were planned but not observed: {', '.join(missing[:5])}")
    return "\n".join(text)


def _pair(planned: int, seen: int) -> tuple[str, str, str]:
    error = f"{planned / seen - 1:+.0%}" if seen else "-"
    return format_time(planned), format_time(seen), error
