"""Bounds from work shared out over devices: of the whole step, of windows in it, with memory.

Columns `d` are devices, or kinds of equal devices, whose streams count together. For any weights
`w[d] >= 0` with sum 1, the largest load of a device is at least

    sum over v of min over d of w[d] * time[v, d] / streams[d]

(the dual of fractional assignment to unrelated devices, whose optimum over `w` is the value of that
linear program). Weights are found by multiplicative updates; all weights are valid.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

_ROUNDS = 100
_CUTS = 32


def dual_weights(share: F64, rounds: int = _ROUNDS) -> F64:
    """Weights that make the load bound large.

    Args:
        share: Time of each task, or group of tasks, on each device, over its streams; infinite
            where it may not go. `[N, D]`
        rounds: Updates.

    Returns:
        Weights with sum 1. `[D]`
    """
    count = share.shape[1]
    weights = np.full(count, 1 / count)
    best, best_value = weights, -1.0
    for round_ in range(rounds):
        cost = share * weights[None, :]
        choice = cost.argmin(axis=1)
        rows = np.arange(len(share))
        value = float(cost[rows, choice].sum())
        if value > best_value:
            best, best_value = weights, value
        load = np.bincount(choice, share[rows, choice], count)
        top = load.max(initial=0)
        if top <= 0:
            break
        step = 2.0 / (round_ + 4) * load / top
        # exp(step) to second order: exp itself rounds differently on different processors
        weights = weights * (1 + step + step * step / 2)
        weights = weights / weights.sum()
    return best


def window_bound(head: I64, tail: I64, share: F64, streams: I64) -> float:
    """The best bound from work that has to happen inside a window.

    Let all tasks of a set `S` have a head of at least `h`. With `m` streams in all, sorted by
    falling weight,

        step >= sum over S of min over d of w[d] time / streams + sum over i of w_i (r_i + q_i)

    where `r_i` and `q_i` are the i-th smallest heads and tails in `S`: streams begin and end with
    different tasks, and one without a task of `S` has room for more than that, given that some
    task has a head of at least `r_m` and a tail of at least `q_m`, as when `S` has `2m - 1` tasks.
    Sets tried are `head >= h` and `tail >= q`; smaller sets count with the smallest head and tail.
    Then weights are improved for the best set, and all is done once more.

    Args:
        head, tail: Times before and after each task. `[N]`
        share: As `dual_weights` has it. `[N, D]`
        streams: Streams of each device. `[D]`
    """
    works = np.flatnonzero(share.min(axis=1, initial=np.inf) > 0)
    head, tail, share = head[works], tail[works], share[works]
    order = np.argsort(tail, kind="stable")[::-1]  # equal tails alike on every machine
    head, tail, share = head[order], tail[order], share[order]
    if not len(head):
        return 0.0
    best, chosen = 0.0, np.ones(len(head), bool)
    for _ in range(2):
        weights = dual_weights(share[chosen])
        value, chosen = _best_window(head, tail, share, weights, streams)
        best = max(best, value)
    return best


def _best_window(
    head: I64, tail: I64, share: F64, weights: F64, streams: I64
) -> tuple[float, NDArray[np.bool_]]:
    """The bound for these weights, and the set that gives it; tasks come by falling tail."""
    work = (share * weights[None, :]).min(axis=1)
    per_stream = np.sort(np.repeat(weights / streams, streams))[::-1]
    count = len(per_stream)
    best, where = 0.0, (0, len(head))
    for low in np.unique(np.quantile(head, np.linspace(0, 1, _CUTS), method="nearest")).tolist():
        inside = head >= low
        tails, total = tail[inside], np.cumsum(work[inside])
        after = tails.astype(np.float64)
        heads = float(low)
        values = total + after + heads
        if len(tails) >= 2 * count - 1:
            first = np.partition(head[inside], count - 1)[:count]
            ahead = float(np.sort(first) @ per_stream)
            behind = np.convolve(after, per_stream)[: len(after)]
            many = np.arange(len(after)) >= 2 * count - 2
            values = np.maximum(values, np.where(many, total + behind + ahead, 0.0))
        place = int(values.argmax())
        if values[place] > best:
            best, where = float(values[place]), (low, int(tails[place]))
    return best, (head >= where[0]) & (tail >= where[1])


def memory_load(time: F64, streams: I64, static_bytes: I64, room: F64) -> float:
    """Load of devices that memory forces work onto.

    For every set `A` of columns: what does not fit there must go to the others, `B`. They run at
    least the groups that may not go to `A`, and of the others those whose work there is smallest
    for their bytes, until the rest fits `A` (the last one in part).

    Args:
        time: Time of each group on each column; infinite where it may not go. `[G, D]`
        streams: Streams of each column. `[D]`
        static_bytes: What each group has to hold. `[G]`
        room: Bytes that the devices of each column can hold. `[D]`

    Complexity: O(2^D G log G).
    """
    count, total = time.shape[1], float(static_bytes.sum())
    if not len(time) or (total <= room).all():
        return 0.0  # no more than the load alone
    best = 0.0
    for bits in range(1, 2**count - 1):
        ours = np.array([bool(bits >> d & 1) for d in range(count)])
        mine, theirs = time[:, ours].min(axis=1), time[:, ~ours].min(axis=1)
        forced = np.isinf(mine)
        work = float(theirs[forced].sum())
        excess = float(static_bytes[~forced].sum() - room[ours].sum())
        if excess > 0:
            movable = ~forced & (static_bytes > 0) & np.isfinite(theirs)
            work += _cheapest(theirs[movable], static_bytes[movable], excess)
        best = max(best, work / float(streams[~ours].sum()))
    return best


def _cheapest(time: F64, size: I64, needed: float) -> float:
    """Least time of a set of groups, the last one in part, that holds the needed bytes."""
    order = np.argsort(time / size, kind="stable")
    before = np.cumsum(size[order]) - size[order]
    part = np.clip((needed - before) / size[order], 0.0, 1.0)
    return float(part @ time[order])
