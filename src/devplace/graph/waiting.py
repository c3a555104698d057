"""Detect deadlock among ops that run in fixed orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def waiting_pair(
    reads: Sequence[Sequence[int]], order: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """An op and an op whose result it needs that wait for each other; None if all can run.

    Args:
        reads: Per op the ops whose results it needs; by itself without cycles.
        order: Per device its ops in the order it runs them.

    Returns:
        (consumer, producer): the producer, directly or not, comes after the consumer.

    Complexity: O(ops + reads).
    """
    before = [-1] * len(reads)
    for row in order:
        for first, second in pairwise(row):
            before[second] = first
    needs = [[*row, ahead] if ahead >= 0 else row for row, ahead in zip(reads, before, strict=True)]
    stuck = _never_ready(needs)
    if not stuck:
        return None
    op = min(stuck)
    path: dict[int, int] = {}  # stuck op -> a stuck op it waits for, in the order of the walk
    while op not in path:
        path[op] = next(need for need in needs[op] if need in stuck)
        op = path[op]
    # `op` is on a cycle; orders alone are none, so it holds data too
    while path[op] not in reads[op]:
        op = path[op]
    return op, path[op]


def _never_ready(needs: Sequence[Sequence[int]]) -> set[int]:
    """Ops that wait for themselves, or for one that does."""
    missing = [len(row) for row in needs]
    users: list[list[int]] = [[] for _ in needs]
    for op, row in enumerate(needs):
        for need in row:
            users[need].append(op)
    ready = [op for op, count in enumerate(missing) if count == 0]
    while ready:
        for user in users[ready.pop()]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return {op for op, count in enumerate(missing) if count}
