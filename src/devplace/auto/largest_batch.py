"""The largest batch that fits a machine, reckoned from the memory of two batches and then tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devplace.auto.step_variants import StepVariants
from devplace.errors import CaptureError
from devplace.graph import Captured
from devplace.simulator import Timeline

MAX_TRIES = 3

Excess = Sequence[Sequence[int]]
"""Of some placements the bytes over the limit (below it: negative) of each device and pool; first
that on one device."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch found to fit.

    Attributes:
        recompute: Whether repeated blocks are computed again in the backward pass.
        rows: Rows of it; 0 if not even one fits, or none was found.
        row_bytes: Memory that each further row takes, on one device.
        step_ns: Predicted time of its step; 0 if it was not captured.
        is_checked: Whether a step with so many rows was captured, and fits (for 0: one with one
            row was, and does not). If not, `rows` is an estimate.
        reason: Why there is no better answer.
    """

    recompute: bool
    rows: int = 0
    row_bytes: int = 0
    step_ns: int = 0
    is_checked: bool = False
    reason: str = ""


def largest_batch(
    steps: StepVariants,
    recompute: bool,
    excess: Callable[[Captured], Excess],
    nearest: Callable[[Captured], Timeline],
) -> LargestBatch:
    """Find the largest batch.

    The memory of a device is a straight line in the rows, as long as placement and ops stay the
    same. It is drawn through the given batch and twice as many rows; the batch at which it meets the
    limit is captured, and the line drawn anew through that if it did not hold.

    Args:
        steps: The step.
        recompute: Whether blocks are computed again.
        excess: Excess of the same simple placements for each graph.
        nearest: The step of a placement that fits, if one is found, else of the nearest.
    """
    try:
        few = steps.rows
        less = excess(steps.capture(recompute))
        rows = 2 * few
        more = excess(steps.capture(recompute, rows=rows))
    except CaptureError as error:
        return LargestBatch(recompute, reason=str(error))
    first = zip(less[0], more[0], strict=True)
    row_bytes = -(min(before - after for before, after in first) // few)
    found = LargestBatch(recompute, row_bytes=row_bytes)
    tried: set[int] = set()
    while len(tried) < MAX_TRIES:
        wanted = _meets_limit((few, less), (rows, more))
        if wanted is None:
            reason = "memory does not grow with the batch"
            return found if found.is_checked else LargestBatch(recompute, reason=reason)
        if wanted in tried or (found.is_checked and wanted <= found.rows):
            break
        tried.add(wanted)
        try:
            graph = steps.capture(recompute, rows=0 if wanted == steps.rows else wanted)
        except CaptureError as error:
            return found if found.is_checked else _estimate(found, wanted, str(error))
        timeline = nearest(graph)
        if timeline.is_feasible:
            found = LargestBatch(recompute, wanted, row_bytes, timeline.makespan_ns, True)
        elif wanted == 1:
            return LargestBatch(recompute, row_bytes=row_bytes, is_checked=True)
        if wanted != few:
            rows, more = wanted, excess(graph)
    if found.is_checked:
        return found
    reason = f"the steps captured with {', '.join(map(str, sorted(tried)))} rows do not fit"
    return _estimate(found, min(tried) - 1, reason)


def _estimate(found: LargestBatch, rows: int, reason: str) -> LargestBatch:
    return LargestBatch(found.recompute, rows, found.row_bytes, reason=reason)


def _meets_limit(less: tuple[int, Excess], more: tuple[int, Excess]) -> int | None:
    """Most rows, at least 1, at which one of the placements is within all limits, by straight lines
    through two batches; None if memory does not grow."""
    (few, before), (many, after) = less, more
    found = [
        min(
            (few + -low * (many - few) // (high - low) for low, high in rows if high > low),
            default=None,
        )
        for rows in (list(zip(*pair, strict=True)) for pair in zip(before, after, strict=True))
        if all(high > low or low <= 0 for low, high in rows)
    ]
    growing = [rows for rows in found if rows is not None]
    if found and len(growing) < len(found):
        return None
    return max(1, *growing) if growing else 1
