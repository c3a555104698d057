"""Choose one variant of each node: least time within the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

MAX_BRANCHES = 100  # choices tried before the best so far is taken

Rows = list[list[float]]


def cheapest_fit(times: Rows, held: Rows, limit: float) -> tuple[list[int], bool]:
    """Variant of each node with the least total time among those that fit, by branch and bound.

    A multiple-choice knapsack. Equal nodes are interchangeable: their variants are tried in one
    order only. The bound lets each byte be saved at the best rate that its node offers.

    Args:
        times: Time of each variant of each node.
        held: Bytes of each variant of each node.
        limit: Bytes that the choice may hold. The smallest variants fit.

    Returns:
        Variant of each node, and whether it is certainly the best.
    """
    search = _Branches(times, held, limit)
    search.descend(0, 0.0, search.wanted)
    return search.best, search.branches <= MAX_BRANCHES


class _Branches:
    def __init__(self, times: Rows, held: Rows, limit: float) -> None:
        rows = [_undominated(t, h) for t, h in zip(times, held, strict=True)]
        # What each variant costs and saves against the node's fastest: equal for equal nodes.
        # Rounded to 1e-15 s and down to bytes: sums in another order make no difference.
        saving = [
            [(round(t - row[0][0], 15), floor(row[0][1] - h), j) for t, h, j in row] for row in rows
        ]
        self.order = sorted(range(len(rows)), key=lambda i: (_rate(saving[i]), saving[i], i))
        self.options = [saving[i] for i in self.order]
        self.rates = [_rate(row) for row in self.options]
        self.most = [row[-1][1] for row in self.options]
        self.wanted = sum(row[0][1] for row in rows) - limit * (1 + 1e-12)
        self.chosen = [0] * len(rows)
        self.best = self.chosen
        self.best_cost = float("inf")
        self.branches = 0
        self._keep(self._greedy())

    def _keep(self, chosen: list[int]) -> None:
        cost = sum(row[j][0] for row, j in zip(self.options, chosen, strict=True))
        if cost < self.best_cost:
            self.best_cost = cost
            self.best = [0] * len(chosen)
            for position, j in enumerate(chosen):
                self.best[self.order[position]] = self.options[position][j][2]

    def _greedy(self) -> list[int]:
        """Start from the fastest; save memory where it costs the least time per byte."""
        chosen, wanted = [0] * len(self.options), self.wanted
        while wanted > 0:
            swaps = [
                ((row[j][0] - row[c][0]) / min(wanted, row[j][1] - row[c][1]), i, j)
                for i, (row, c) in enumerate(zip(self.options, chosen, strict=True))
                for j in range(c + 1, len(row))
            ]
            if not swaps:
                break
            _, i, j = min(swaps)
            wanted -= self.options[i][j][1] - self.options[i][chosen[i]][1]
            chosen[i] = j
        return chosen

    def descend(self, at: int, cost: float, wanted: float) -> None:
        """Try the variants of the node at position `at`; `wanted` bytes are still to be saved."""
        self.branches += 1
        if self.branches > MAX_BRANCHES:
            return
        if wanted <= 0 or at == len(self.order):
            if wanted <= 0 and cost < self.best_cost:
                self._keep(self.chosen[:at] + [0] * (len(self.order) - at))
            return
        if cost + self._relaxed(at, wanted) >= self.best_cost * (1 - 1e-12):
            return
        row = self.options[at]
        most = len(row) - 1
        if at and _same(row, self.options[at - 1]):  # equal nodes: savings never rise
            most = self.chosen[at - 1]
        for j in range(most, -1, -1):
            self.chosen[at] = j
            self.descend(at + 1, cost + row[j][0], wanted - row[j][1])

    def _relaxed(self, at: int, wanted: float) -> float:
        """Least cost if each byte were saved at its node's best rate; infinite if never enough."""
        cost = 0.0
        for rate, most in zip(self.rates[at:], self.most[at:], strict=True):
            saved = min(wanted, most)
            cost += rate * saved if saved else 0.0
            wanted -= saved
            if wanted <= 0:
                return cost
        return float("inf")


Row = Sequence[tuple[float, float, int]]


def _same(row: Row, other: Row) -> bool:
    return [o[:2] for o in row] == [o[:2] for o in other]


def _undominated(times: list[float], held: list[float]) -> Row:
    """Variants from fastest to smallest; those both slower and larger than another are left out."""
    row: list[tuple[float, float, int]] = []
    for time, size, j in sorted(
        (t, h, j) for j, (t, h) in enumerate(zip(times, held, strict=True))
    ):
        if not row or size < row[-1][1]:
            row.append((time, size, j))
    return row


def _rate(row: Row) -> float:
    """Least time per byte saved, starting from the fastest variant."""
    return min((cost / saved for cost, saved, _ in row[1:]), default=float("inf"))
