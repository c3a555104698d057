"""Tables for a terminal, and the same figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from devplace.device_kinds import is_host
from devplace.errors import InputError
from devplace.placers import Result
from devplace.problem import Problem
from devplace.report.memory import CATEGORIES, memory_rows
from devplace.report.summary import best_single, devices_in_use, missing_text, single_name
from devplace.report.throughput_plan import value_json
from devplace.simulator import Timeline
from devplace.simulator.bounds import LowerBound, lower_bound
from devplace.units import SIZE_UNITS, format_bytes, format_time

_HEADS = {
    "parameters": "params",
    "optimizer state": "state",
    "gradients": "grads",
    "activations": "activ.",
    "temporaries": "temp.",
    "receive buffers": "receive",
}


@dataclass(frozen=True)
class Skipped:
    """A placer that gave no placement.

    Attributes:
        placer: Its name.
        reason: Why not, such as what `supports` said.
        missing_bytes: Device -> bytes lacking, where that was the reason.
    """

    placer: str
    reason: str
    missing_bytes: dict[str, int] = field(default_factory=dict)


def comparison_table(
    results: Sequence[Result | Skipped],
    *,
    problem: Problem | None = None,
    bound: LowerBound | None = None,
    single: Timeline | None = None,
) -> Table:
    """One row per placer, in the given order; the lower bound last; the fastest one in bold.

    Args:
        results: What the placers found; `Skipped` for those that found nothing.
        problem: What was placed; needed only when all were skipped.
        bound: Lower bounds, if already known.
        single: Best step on one device, if already known.

    Raises:
        InputError: No result and no problem.
    """
    problem = _problem_of(results, problem)
    found = [r for r in results if isinstance(r, Result)]
    bound = _best_bound(found) or bound or lower_bound(problem)
    single = single or best_single(problem, [result.timeline for result in found])
    unit = _unit(max((int(r.timeline.peak_bytes.max()) for r in found), default=0))
    title = f"{problem.graph.name} on {problem.machine.name}"
    table = plain_table(title)
    table.add_column("placer", overflow="fold")
    own = [r for r in found if r.has_own_value]
    if own:
        table.add_column(own[0].objective.label, justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("gap", justify="right", no_wrap=True)
    table.add_column(f"peak memory, {unit}", overflow="fold", min_width=14)
    for name in ("moved", "evals", "s") if not own else ("moved", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    best = min((r.value_ns for r in found if r.is_feasible), default=-1)
    for row in results:
        if isinstance(row, Skipped):
            reason = Text(_skip_text(row))
            blank = ["-"] * (3 - bool(own))
            before = ["-"] * (3 + bool(own))
            table.add_row(Text(row.placer), *before, reason, *blank)
        else:
            style = "bold" if row.is_feasible and row.value_ns == best else ""
            table.add_row(*_cells(row, single, unit), style=style)
    table.add_section()
    least = max((r.bound_ns for r in own), default=bound.step_ns)
    times = [format_time(least)] * bool(own) + [format_time(bound.step_ns)]
    table.add_row("lower bound", *times, _ratio(single.makespan_ns, least), "", _bound_text(bound))
    name = single_name(single)
    lacks = "" if single.is_feasible else f" without its memory limit: {_lacks(single)}"
    if lacks or name != "one device":
        table.caption = Text(f"Speed-up is over {name}{lacks}.")
        table.caption_justify = "left"
    return table


def comparison_json(
    results: Sequence[Result | Skipped],
    *,
    problem: Problem | None = None,
    bound: LowerBound | None = None,
) -> dict[str, Any]:
    """The same rows with integer ns and bytes; figures that do not exist are None.

    Raises:
        InputError: No result and no problem.
    """
    problem = _problem_of(results, problem)
    found = [r for r in results if isinstance(r, Result)]
    bound = _best_bound(found) or bound or lower_bound(problem)
    return {
        "model": problem.graph.name,
        "machine": problem.machine.name,
        "lower_bound_ns": bound.step_ns,
        "rows": [_json_row(row) for row in results],
    }


def memory_table(timeline: Timeline) -> Table:
    """What fills each device at the moment of its peak, its limit, and whether it fits."""
    rows = memory_rows(timeline)
    used = set(devices_in_use(timeline))
    rows = [row for d, row in enumerate(rows) if d in used]
    shown = [name for name in CATEGORIES if any(row.parts[name] for row in rows)]
    heads = [_HEADS.get(name, name) for name in shown]
    unit = _unit(max((row.peak_bytes for row in rows), default=0))
    title = f"Memory at each device's peak, {unit}"
    table = plain_table(title)
    table.add_column("device", no_wrap=True)
    for name in (*heads, "peak", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row in rows:
        sizes = [_size(n, unit) for n in (*(row.parts[name] for name in shown), row.peak_bytes)]
        limit = format_bytes(row.limit_bytes)
        lacks = f"lacks {format_bytes(row.missing_bytes)}" if row.missing_bytes else "yes"
        table.add_row(Text(row.device), *sizes, limit, lacks)
    pools = {n: b for n, b in timeline.missing_bytes.items() if n not in {r.device for r in rows}}
    if pools:
        table.caption = Text(f"Shared memory: {missing_text(pools)}.")
        table.caption_justify = "left"
    return table


def memory_json(timeline: Timeline) -> dict[str, Any]:
    """The same as integers; all devices, all categories (`optimizer_state_bytes` ...)."""
    return {
        "fits": timeline.is_feasible,
        "missing_bytes": timeline.missing_bytes,
        "devices": {
            row.device: {
                **{f"{name.replace(' ', '_')}_bytes": n for name, n in row.parts.items()},
                "peak_bytes": row.peak_bytes,
                "limit_bytes": row.limit_bytes,
                "peak_ns": row.peak_ns,
            }
            for row in memory_rows(timeline)
        },
    }


def plain_table(title: str) -> Table:
    """An empty table as the command line shows them."""
    return Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def _problem_of(results: Sequence[Result | Skipped], problem: Problem | None) -> Problem:
    for result in results:
        if isinstance(result, Result):
            return result.timeline.problem
    if problem is None:
        raise InputError(
            "A comparison needs at least one result, or the problem. Pass problem=...."
        )
    return problem


def _best_bound(found: Sequence[Result]) -> LowerBound | None:
    """The largest bound that any of the placers knew."""
    bounds = [result.bound for result in found]
    return max(bounds, key=lambda b: (b.is_infeasible, b.step_ns)) if bounds else None


def gap_text(result: Result) -> str:
    """How far a plan is above its lower bound, or in a word what else is known of it."""
    if result.status != "feasible":
        return result.status
    return f"{result.gap:.1%}" if result.gap < 0.1 else f"{result.gap:.0%}"


def _cells(result: Result, single: Timeline, unit: str) -> list[Text]:
    timeline = result.timeline
    memory = _peaks(timeline, unit)
    if not timeline.is_feasible:
        memory += f"\ndoes not fit: {missing_text(timeline.missing_bytes)}"
    return [
        Text(result.placer),
        *([Text(format_time(result.value_ns))] if result.has_own_value else []),
        Text(format_time(result.step_ns)),
        Text(_ratio(single.makespan_ns, result.value_ns)),
        Text(gap_text(result)),
        Text(memory),
        Text(format_bytes(timeline.transfer_bytes)),
        *([] if result.has_own_value else [Text(_count(result.evaluations))]),
        Text(f"{result.seconds:.1f}"),
    ]


def _count(number: int) -> str:
    """In at most six characters, so that names of placers are not cut in 80 columns."""
    return f"{number:,}" if number < 100_000 else f"{number / 1e3:,.0f}k"


def _peaks(timeline: Timeline, unit: str) -> str:
    """Peaks of the devices in use; neighbours that show the same figure are put together.

    A device is named by its index when all accelerators share one name; `cpu` stays `cpu`.
    """
    names = timeline.problem.machine.device_names
    hosts = [name for name in names if is_host(name)]
    kinds = {name.partition(":")[0] for name in names if name not in hosts}
    shown = []
    for d in devices_in_use(timeline):
        kind, _, index = names[d].partition(":")
        if names[d] in hosts and (len(hosts) == 1 or kinds):
            label = kind if len(hosts) == 1 else f"{kind}{index}"
        else:
            label = index if index and len(kinds) <= 1 else names[d]
        shown.append((label, _size(int(timeline.peak_bytes[d]), unit)))
    parts = []
    for (*_, size), run in groupby(enumerate(shown), key=lambda e: (is_host(e[1][0]), e[1][1])):
        labels = [label for _, (label, _) in run]
        label = labels[0] if len(labels) == 1 else f"{labels[0]}-{labels[-1]}"
        parts.append(f"{label}={size}")
    return "  ".join(parts)


def _unit(num_bytes: int) -> str:
    return next((u for u in ("GiB", "MiB", "KiB") if num_bytes >= SIZE_UNITS[u.upper()]), "B")


def _size(num_bytes: int, unit: str) -> str:
    value = num_bytes / SIZE_UNITS[unit.upper()]
    if value == 0 or unit == "B":
        return f"{value:.0f}"
    if value < 0.01:
        return "<0.01"
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _ratio(single_ns: int, step_ns: int) -> str:
    return f"{single_ns / step_ns:.2f}x" if step_ns else "-"


def _skip_text(row: Skipped) -> str:
    return row.reason or f"does not fit: {missing_text(row.missing_bytes)}"


def _lacks(single: Timeline) -> str:
    return f"alone, {missing_text(single.missing_bytes)}"


def _bound_text(bound: LowerBound) -> str:
    return "proved: nothing fits" if bound.is_infeasible else ""


def _json_row(row: Result | Skipped) -> dict[str, Any]:
    if isinstance(row, Skipped):
        empty: dict[str, Any] = {"placer": row.placer, "step_ns": None, "feasible": False}
        empty |= {"status": "unknown", "gap": None, "lower_bound_ns": None}
        empty |= {"peak_bytes": {}, "transfer_bytes": None, "evaluations": None, "seconds": None}
        if row.missing_bytes:
            empty["missing_bytes"] = row.missing_bytes
        return {**empty, "reason": _skip_text(row)}
    timeline = row.timeline
    names = timeline.problem.machine.device_names
    out: dict[str, Any] = {
        "placer": row.placer,
        "step_ns": row.step_ns,
        "feasible": row.is_feasible,
        "status": row.status,
        "gap": row.gap if row.is_feasible else None,
        "lower_bound_ns": row.bound.step_ns,
        "peak_bytes": dict(zip(names, map(int, timeline.peak_bytes), strict=True)),
        "transfer_bytes": timeline.transfer_bytes,
        "evaluations": row.evaluations,
        "seconds": row.seconds,
        **value_json(row),
    }
    if not row.is_feasible:
        out["missing_bytes"] = timeline.missing_bytes
        out["reason"] = missing_text(timeline.missing_bytes)
    return out
