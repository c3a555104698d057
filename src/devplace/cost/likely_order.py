"""The likely execution order of ops on one device."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from devplace.graph import OpGraph


def likely_order(graph: OpGraph, duration_ns: Sequence[int]) -> list[int]:
    """All ops by list scheduling on one device: of those ready, the longest path to the end first.

    Plans order their ops likewise. It differs from the order of the trace where ops are not urgent
    (gradients of weights) and between micro-batches, so what a cache still holds differs too.

    Args:
        graph: The step.
        duration_ns: Time of each op, about. `[V]`

    Complexity: O((V + E) log V).
    """
    _, users = _neighbours(graph)
    rank = [0] * len(graph.ops)
    for index in reversed(range(len(graph.ops))):
        longest = max((rank[user] for user in users[index]), default=0)
        rank[index] = longest + int(duration_ns[index])
    return in_order_of(graph, [-length for length in rank])


def in_order_of(graph: OpGraph, key: Sequence[int]) -> list[int]:
    """All ops, each after those it reads; of those ready, the one with the smallest key first.

    Complexity: O((V + E) log V).
    """
    makers, users = _neighbours(graph)
    missing = [len(earlier) for earlier in makers]
    ready = [(int(key[index]), index) for index, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for user in users[index]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (int(key[user]), user))
    return order


def _neighbours(graph: OpGraph) -> tuple[list[list[int]], list[list[int]]]:
    """Per op those whose tensors it reads, and those that read its own."""
    maker = {tensor: index for index, op in enumerate(graph.ops) for tensor in op.outputs}
    makers = [sorted({maker[tensor] for tensor in op.inputs}) for op in graph.ops]
    users: list[list[int]] = [[] for _ in graph.ops]
    for index, earlier in enumerate(makers):
        for other in earlier:
            users[other].append(index)
    return makers, users
