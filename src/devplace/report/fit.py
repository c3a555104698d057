"""Whether a step fits a machine: in words, as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from devplace.auto.fit import Fit, Way
from devplace.auto.largest_batch import LargestBatch
from devplace.report.text_tables import plain_table
from devplace.units import format_bytes, format_time


def verdict(fit: Fit) -> str:
    """One line: whether it fits, else what is missing where, and what it takes.

    Example:
        does not fit as it is: misses 2.9 GiB on cuda:0; with recompute it fits on 2 of 4 GPUs, 14 %
        slower
    """
    first, best = fit.ways[0], fit.best
    if first.fits:
        text = f"fits on {_of_all(first, fit)}"
        leaner = fit.leanest
        if leaner is None or leaner is first:
            return text
        return f"{text}; {_with(leaner)} on {_of_all(leaner, fit)}, {_slower(fit, leaner)}"
    text = f"does not fit as it is: {_misses(first)}"
    if best is not None:
        return f"{text}; {_with(best)} it fits on {_of_all(best, fit)}, {_slower(fit, best)}"
    if fit.nearest is first:
        return text
    return f"{text}; {_with(fit.nearest)} it still {_misses(fit.nearest)}"


def fit_lines(fit: Fit) -> list[str]:
    """The verdict, what it is compared with, and the largest batches."""
    rows = f", batch {fit.rows}" if fit.rows else ""
    lines = [f"{fit.model}{rows} on {fit.machine}: {verdict(fit)}"]
    if fit.best is not None:
        lines.append(
            f"Slower and faster: than as it is on one {fit.kind} that had the memory "
            f"({format_time(fit.whole_ns)}); predicted, without a search for the fastest placement."
        )
    return [*lines, *(f"Largest batch{_largest_text(each)}" for each in fit.largest)]


def fit_table(fit: Fit) -> Table:
    """One row per way, as it is first; the best in bold."""
    table = plain_table("")
    table.add_column("way", no_wrap=True)
    table.add_column("fits on", no_wrap=True)
    for name in ("step", "to one", "fullest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for way in fit.ways:
        style = "bold" if way is fit.best else ""
        if way.reason:
            cells = ["-", "-", "-", "-", f"not possible: {way.reason.partition('. ')[0]}"]
        else:
            missing = _misses(way) if way.missing_bytes else ""
            cells = [
                _of_all(way, fit) if way.fits else "-",
                format_time(way.step_ns),
                f"{1 + fit.slower(way):.2f}x",
                format_bytes(way.peak_bytes),
                missing,
            ]
        table.add_row(*map(Text, (_name(way), *cells)), style=style)
    return table


def machines_table(fits: Sequence[Fit]) -> Table:
    """One row per machine, in the given order; the fastest in bold."""
    table = plain_table("")
    table.add_column("machine", overflow="fold")
    table.add_column("as it is", overflow="fold")
    table.add_column("fits with", no_wrap=True)
    table.add_column("on", no_wrap=True)
    for name in ("step", "fullest"):
        table.add_column(name, justify="right", no_wrap=True)
    fastest = min((fit.best.step_ns for fit in fits if fit.best), default=-1)
    for fit in fits:
        first, best = fit.ways[0], fit.best
        found = ["nothing", "-", "-", "-"]
        if best is not None:
            sizes = format_time(best.step_ns), format_bytes(best.peak_bytes)
            found = [_name(best), _of_all(best, fit), *sizes]
        whole = "fits" if first.fits else _misses(first)
        style = "bold" if best is not None and best.step_ns == fastest else ""
        table.add_row(*map(Text, (fit.machine, whole, *found)), style=style)
    return table


def fit_json(fit: Fit) -> dict[str, Any]:
    """The record with integer ns and bytes, whether it and each way fits, and the verdict."""
    ways = [{**asdict(way), "fits": way.fits} for way in fit.ways]
    return {**asdict(fit), "ways": ways, "fits": fit.best is not None, "verdict": verdict(fit)}


def _name(way: Way) -> str:
    return _with(way).removeprefix("with ") or "as it is"


def _with(way: Way) -> str:
    parts = ["recompute"] * way.recompute
    parts += [f"{way.micro_batches} micro-batches"] * (way.micro_batches > 1)
    return f"with {' and '.join(parts)}" if parts else ""


def _of_all(way: Way, fit: Fit) -> str:
    count, total = len(way.devices), len(fit.devices)
    return f"1 {fit.kind}" if total == 1 else f"{count} of {total} {fit.kind}s"


def _misses(way: Way) -> str:
    worst = max(way.missing_bytes, key=lambda name: way.missing_bytes[name])
    proved = " (proved: no placement fits)" if way.is_proved else ""
    return f"misses {format_bytes(way.missing_bytes[worst])} on {worst}{proved}"


def _slower(fit: Fit, way: Way) -> str:
    percent = round(100 * fit.slower(way))
    if percent == 0:
        return "as fast"
    return f"{abs(percent)} % {'slower' if percent > 0 else 'faster'}"


def _largest_text(found: LargestBatch) -> str:
    how = " with recompute" if found.recompute else ""
    if not found.row_bytes:
        return f"{how}: unknown, {found.reason.partition('. ')[0]}"
    each = f"each further row takes {format_bytes(found.row_bytes)} on one device"
    if found.is_checked:
        size = f"{found.rows:,}" if found.rows else "not even one row fits"
        return f"{how}: {size} (captured and placed; {each})"
    return f"{how}: about {found.rows:,} (an estimate: {found.reason.partition('. ')[0]}; {each})"
