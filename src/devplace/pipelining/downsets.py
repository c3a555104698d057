"""Down-sets of a graph: the points where a pipeline can be cut."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.pipelining.load_problem import I32


@dataclass(frozen=True, eq=False)
class Downsets:
    """Sets of nodes that hold all predecessors of their members, by rising size.

    Attributes:
        members: `[I, N]`; the first row is empty, the last one full.
        complete: All down-sets are there; otherwise only the prefixes of one topological order.
    """

    members: NDArray[np.bool_]
    complete: bool

    def below(self, at: int) -> NDArray[np.int64]:
        """Rows of the proper subsets of row `at`."""
        rows = self.members[:at]
        return np.flatnonzero(~(rows & ~self.members[at]).any(axis=1))

    def above(self, at: int) -> NDArray[np.int64]:
        """Rows of the proper supersets of row `at`."""
        rows = self.members[at + 1 :]
        return at + 1 + np.flatnonzero(~(self.members[at] & ~rows).any(axis=1))


def make_downsets(num_nodes: int, edge_src: I32, edge_dst: I32, limit: int) -> Downsets:
    """All down-sets if there are at most `limit`, else that many prefixes of a topological order.

    Raises:
        ProblemError: The edges form a cycle.
    """
    before = [0] * num_nodes
    after: list[set[int]] = [set() for _ in range(num_nodes)]
    for a, b in zip(edge_src.tolist(), edge_dst.tolist(), strict=True):
        before[b] |= 1 << a
        after[a].add(b)
    full = (1 << num_nodes) - 1
    level, found = [0], [0]
    complete = True
    while level and complete:
        grown = set[int]()
        for down in level:
            grown |= {
                down | 1 << v
                for v in range(num_nodes)
                if not down >> v & 1 and before[v] & ~down == 0
            }
            if len(found) + len(grown) > limit:
                complete = False
                break
        level = sorted(grown)
        found += level
    if not complete:
        found = _prefixes(before, after)
    if found[-1] != full:
        raise ProblemError("A pipeline needs a graph without cycles: some nodes lie on one.")
    if len(found) > limit:
        keep = np.unique(np.linspace(0, len(found) - 1, max(2, limit)).astype(int))
        found = [found[row] for row in keep]
    bits = [[down >> v & 1 for v in range(num_nodes)] for down in found]
    return Downsets(np.array(bits, np.bool_).reshape(len(found), num_nodes), complete)


def _prefixes(before: list[int], after: list[set[int]]) -> list[int]:
    down, found = 0, [0]
    missing = [0] * len(before)
    for readers in after:
        for v in readers:
            missing[v] += 1
    # Nodes whose predecessors came last first: depth first, so that few outputs wait.
    ready = [(-before[v].bit_length(), v) for v, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        _, latest = heapq.heappop(ready)
        down |= 1 << latest
        found.append(down)
        for v in after[latest]:
            missing[v] -= 1
            if not missing[v]:
                heapq.heappush(ready, (-before[v].bit_length(), v))
    return found
