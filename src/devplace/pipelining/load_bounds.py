"""Lower bounds on the largest load, and proofs that no placement exists."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np

from devplace.pipelining.items import Items
from devplace.units import format_bytes


def why_infeasible(items: Items) -> str:
    """Why no placement exists, where sums show it; empty otherwise.

    CPUs have no memory limit, so that with one of them everything can be placed.
    """
    if items.num_cpus:
        return ""
    limit, k = items.memory_bytes, items.num_accelerators
    unable = np.flatnonzero(items.can_accelerate == 0)
    if len(unable):
        node = int(np.flatnonzero(items.item == unable[0])[0])
        return f"node {node} or one of its class runs on CPUs only, and there is no CPU"
    total = int(items.size_bytes.sum())
    if total > k * limit:
        room = format_bytes(k * limit)
        return f"all nodes hold {format_bytes(total)} and {k} accelerators have {room}"
    large = np.flatnonzero(items.size_bytes > limit)
    if len(large):
        node = int(np.flatnonzero(items.item == large[0])[0])
        size = format_bytes(int(items.size_bytes[large[0]]))
        return f"node {node} and its class hold {size}, an accelerator has {format_bytes(limit)}"
    return ""


def work_bound(items: Items) -> int:
    """Largest load if work could be cut anywhere and nothing had to be moved, ps.

    Items with the highest CPU time per accelerator time go to accelerators first; the one on the
    boundary is cut so that both kinds of devices end together (a fractional knapsack).
    """
    k, cpus = items.num_accelerators, items.num_cpus
    able = (items.can_accelerate > 0) & (items.size_bytes <= items.memory_bytes) & (k > 0)
    forced = int(items.cpu_ps[~able].sum())
    pairs = [
        (int(a), int(c))
        for a, c in zip(items.accelerator_ps[able], items.cpu_ps[able], strict=True)
    ]
    if cpus == 0:
        return -(-sum(a for a, _ in pairs) // k)
    if k == 0:
        return -(-forced // cpus)
    pairs.sort(
        key=lambda pair: (-Fraction(pair[1], pair[0]) if pair[0] else -Fraction(2**62), pair)
    )
    on_accelerators, on_cpus = 0, forced + sum(c for _, c in pairs)
    for a, c in pairs:
        if (on_accelerators + a) * cpus >= (on_cpus - c) * k:
            share = (
                Fraction(k * on_cpus - cpus * on_accelerators, cpus * a + k * c) if a or c else 0
            )
            share = min(Fraction(1), max(Fraction(0), Fraction(share)))
            level = max(Fraction(on_accelerators) + share * a, Fraction(0)) / k
            other = (Fraction(on_cpus) - share * c) / cpus
            return ceil(max(level, other))
        on_accelerators, on_cpus = on_accelerators + a, on_cpus - c
    return ceil(max(Fraction(on_accelerators, k), Fraction(on_cpus, cpus)))


def count_bound(items: Items) -> int:
    """Least `T` that counting does not refute, ps.

    Of the `j` heaviest items, CPUs can take only so many within `T`; some accelerator gets its
    share of the others, rounded up, and so at least the sum of that many of the lightest.

    Source: the counting argument of Dell'Amico and Martello (1995) for parallel machines, with the
    CPUs added.
    """
    k, cpus = items.num_accelerators, items.num_cpus
    if k == 0 or items.num_items == 0:
        return 0
    able = (items.can_accelerate > 0) & (items.size_bytes <= items.memory_bytes)
    times = items.accelerator_ps[able]
    heaviest = np.argsort(-times, kind="stable")
    times = times[heaviest]
    shortest = np.minimum.accumulate(items.cpu_ps[able][heaviest]) if len(times) else times
    before = np.concatenate([[0], np.cumsum(times)])
    count = np.arange(1, len(times) + 1)

    def refuted(limit: int) -> bool:
        each = np.minimum(limit // np.maximum(1, shortest), count)  # products stay small
        taken = np.minimum(min(cpus, len(times)) * each, count)
        taken = np.where(shortest > 0, taken, count) if cpus else np.zeros_like(count)
        most = -(-(count - taken) // k)
        return bool((before[count] - before[count - most] > limit).any())

    low, high = 0, int(times.sum())  # the least that holds is in low..high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if refuted(middle) else (low, middle)
    return low


def quick_bound(items: Items) -> int:
    """The better of the work and counting bounds, ps."""
    return max(work_bound(items), count_bound(items)) if items.num_items else 0


def item_bound(items: Items, native: Any, seconds: float) -> int:
    """Largest over items of the least load of any device that can hold the item, ps.

    With the native module the least load is a minimum cut (see `native/pipelining/cut.hpp`), which
    counts what must be moved however the rest is placed; without it the item's own time counts.
    """
    if native is not None:
        return int(native.item_bound(items, seconds))
    able = (items.can_accelerate > 0) & (items.size_bytes <= items.memory_bytes)
    never = np.iinfo(np.int64).max
    least = np.where(able & (items.num_accelerators > 0), items.accelerator_ps, never)
    if items.num_cpus:
        least = np.minimum(least, items.cpu_ps)
    placed = least[least < never]
    return int(placed.max()) if len(placed) else 0
