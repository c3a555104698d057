"""Find shared channels: which transfers to run at once, and what the outcome means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from devplace.run.probe.report import HOST, ProbeReport, Sharing

Pair = tuple[str, str]
SHARES_FROM = 1.5
"""Slowdown from which on two transfers count as sharing: 2 is full sharing, 1 none."""

# Few pairs are tried: one that shares with the one before it, in the order of names, is taken to
# share with all that this one shares with.


def candidates(pairs: Iterable[Pair]) -> list[tuple[Pair, Pair]]:
    """Pairs of transfers worth trying together.

    Args:
        pairs: The directions that may be used.
    """
    known = sorted(pairs)
    found: list[tuple[Pair, Pair]] = []
    for end in sorted({end for pair in known for end in pair}):
        found += pairwise([pair for pair in known if pair[0] == end])
        found += pairwise([pair for pair in known if pair[1] == end])
    found += [(pair, pair[::-1]) for pair in known if pair < pair[::-1] and pair[::-1] in known]
    peers = [pair for pair in known if HOST not in pair]
    apart = next(((a, b) for a in peers for b in peers if not set(a) & set(b)), None)
    return found + ([apart] if apart else [])


def measure_sharing(
    pairs: Iterable[Pair], together_ns: Callable[[Sequence[Pair]], Sequence[int]]
) -> tuple[Sharing, ...]:
    """Try the candidates.

    Args:
        pairs: The directions that may be used.
        together_ns: Time of a large transfer on each of these at the same time, ns.
    """
    alone: dict[Pair, int] = {}
    found = []
    for both in candidates(pairs):
        for pair in both:
            if pair not in alone:
                alone[pair] = together_ns([pair])[0]
        times = together_ns(both)
        slowdown = sum(t / alone[p] for t, p in zip(times, both, strict=True)) / len(both)
        found.append(Sharing(transfers=both, slowdown=round(slowdown, 3)))
    return tuple(found)


def channels(report: ProbeReport) -> dict[Pair, tuple[str, ...]]:
    """Channels of every pair that shares with others; those not named have one of their own."""
    sharing = [
        (row.transfers[0], row.transfers[1])
        for row in report.sharing
        if len(row.transfers) == 2 and row.slowdown >= SHARES_FROM
    ]
    pairs = [(pair.src, pair.dst) for pair in report.pairs]
    found: dict[Pair, list[str]] = {pair: [] for pair in pairs}
    for side, word in ((0, "out"), (1, "in")):
        for end in sorted({pair[side] for pair in pairs}):
            edges = [(a, b) for a, b in sharing if a[side] == b[side] == end]
            groups = _groups(edges)
            for number, group in enumerate(groups):
                name = f"{end} {word}" + (f" {number + 1}" if len(groups) > 1 else "")
                for pair in group:
                    found[pair].append(name)
    for first, second in sharing:
        if first == second[::-1]:
            name = f"{min(first)} - {max(first)}"
            found[first].append(name)
            found[second].append(name)
        elif not set(first) & set(second):
            for pair in pairs:
                if HOST not in pair:
                    found[pair].append("bridge")
    return {pair: tuple(names) for pair, names in found.items()}


def _groups(edges: Sequence[tuple[Pair, Pair]]) -> list[list[Pair]]:
    """Connected components, each sorted, in the order of their first members."""
    groups: list[set[Pair]] = []
    for edge in edges:
        joined = set(edge).union(*(group for group in groups if group & set(edge)))
        groups = [group for group in groups if not group & joined] + [joined]
    return sorted(sorted(group) for group in groups)
