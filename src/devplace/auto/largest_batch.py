"""The largest batch that fits a machine, reckoned from the memory of two batches and then tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from devplace.auto.step_variants import StepVariants
from devplace.errors import CaptureError
from devplace.graph import Captured
from devplace.simulator import Timeline

MAX_TRIES = 3
FURTHER = 8
"""How many times the given batch the second is. In batches of a few rows the update may need more
memory than the forward pass kept, and the peak hardly grows."""

Excess = Sequence[Sequence[int]]
"""Of some placements the bytes over the limit (below it: negative) of each device and pool; first
that on one device."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch found to fit.

    Attributes:
        recompute: Whether repeated blocks are computed again in the backward pass.
        rows: Rows of it; 0 if not even one fits, or none was found.
        row_bytes: Memory that each further row takes on one device: the mean up to `FURTHER` times
            the given batch.
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
    fuse: bool = False,
) -> LargestBatch:
    """Find the largest batch.

    Where placement and ops stay the same, the memory of a device is the largest of some straight
    lines in the rows. One is drawn through the given batch and a larger one; the batch at which it
    meets the limit is captured, and then a line is drawn through that and the nearest one known.

    Args:
        steps: The step.
        recompute: Whether blocks are computed again.
        excess: Excess of the same simple placements for each graph.
        nearest: The step of a placement that fits, if one is found, else of the nearest.
        fuse: Whether the step is fused.
    """
    try:
        few = steps.rows
        known = {few: excess(steps.capture(recompute, fuse=fuse))}
        known[FURTHER * few] = excess(steps.capture(recompute, 1, FURTHER * few, fuse))
    except CaptureError as error:
        return LargestBatch(recompute, reason=str(error))
    grown = zip(known[few][0], known[FURTHER * few][0], strict=True)
    row_bytes = max(after - before for before, after in grown) // ((FURTHER - 1) * few)
    found = LargestBatch(recompute, row_bytes=row_bytes)
    tried: list[int] = []
    while len(tried) < MAX_TRIES:
        about = tried[-1] if tried else few
        near, far = sorted(sorted(known, key=lambda rows: (abs(rows - about), rows))[:2])
        wanted = _meets_limit(near, known[near], far, known[far])
        if wanted is None:
            return replace(found, reason="memory does not grow with the batch")
        if wanted in tried or wanted <= found.rows:
            break
        tried.append(wanted)
        try:
            graph = steps.capture(recompute, 1, 0 if wanted == few else wanted, fuse)
        except CaptureError as error:
            return found if found.is_checked else replace(found, rows=wanted, reason=str(error))
        timeline = nearest(graph)
        if timeline.is_feasible:
            found = LargestBatch(recompute, wanted, row_bytes, timeline.makespan_ns, True)
        elif wanted == 1:
            return replace(found, is_checked=True)
        known[wanted] = excess(graph)
    if found.is_checked:
        return found
    reason = f"steps captured with {', '.join(map(str, sorted(tried)))} rows do not fit"
    return replace(found, rows=min(tried) - 1, reason=reason)


def _meets_limit(few: int, before: Excess, many: int, after: Excess) -> int | None:
    """Most rows, at least 1, at which one of the placements is within all limits, by straight lines
    through two batches; None if memory does not grow."""
    most = 1
    for least, larger in zip(before, after, strict=True):
        pairs = list(zip(least, larger, strict=True))
        if any(low == high > 0 for low, high in pairs):
            continue  # over the limit with any batch
        growing = [few + -low * (many - few) // (high - low) for low, high in pairs if high > low]
        if not growing:
            return None
        most = max(most, min(growing))
    return most
