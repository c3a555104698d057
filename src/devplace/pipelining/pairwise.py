"""Max load on unequal devices and links: plain Python moves priced link by link."""

from __future__ import annotations

import random
import time

import numpy as np

from devplace.pipelining.load_problem import I32
from devplace.pipelining.plain_search import Shares, anneal
from devplace.pipelining.step_problem import PS_PER_NS, StepProblem

_STEPS_PER_ITEM = 40


class PairShares(Shares):
    """Loads (ps) and held bytes of a placement of classes, kept up to date under moves."""

    def __init__(self, step: StepProblem, device: I32, sizes: list[int]) -> None:
        prices, wires = step.prices, step.problem.core.wires
        self.device = [int(d) for d in device]
        self._times = (step.work_ns * PS_PER_NS // wires.streams[None, :]).tolist()
        self._allowed, self._sizes = step.allowed.tolist(), sizes
        self._limits = list(step.problem.limit_bytes)
        self._kind, self._pays = prices.link_class.tolist(), prices.pays.tolist()
        self.load, self.held = [0] * len(self._pays), [0] * len(self._pays)
        self._nets = _nets(step)
        self.nets_of: list[list[int]] = [[] for _ in self.device]
        self.count = [[0] * len(self._pays) for _ in self._nets]
        for e, (_, ends, _) in enumerate(self._nets):
            for i in ends:
                self.nets_of[i].append(e)
                self.count[e][self.device[i]] += 1
        for i, d in enumerate(self.device):
            self._put(i, d, 1)
        for e in range(len(self._nets)):
            self._pay(e, 1)

    def _put(self, i: int, d: int, sign: int) -> None:
        self.load[d] += sign * self._times[i][d]
        self.held[d] += sign * self._sizes[i]

    def _pay(self, e: int, sign: int) -> None:
        maker, _, price = self._nets[e]
        home = self.device[maker]
        kind, most = self._kind[home], 0
        for d, held in enumerate(self.count[e]):
            if held and d != home:
                cost = price[kind[d]]
                most = max(most, cost)
                if self._pays[d]:
                    self.load[d] += sign * cost
        if self._pays[home]:
            self.load[home] += sign * most

    def move(self, i: int, b: int) -> None:
        """Move class `i` to device `b`."""
        a = self.device[i]
        for e in self.nets_of[i]:
            self._pay(e, -1)
            self.count[e][a] -= 1
            self.count[e][b] += 1
        self._put(i, a, -1)
        self._put(i, b, 1)
        self.device[i] = b
        for e in self.nets_of[i]:
            self._pay(e, 1)

    def can(self, i: int, d: int) -> bool:
        """Whether class `i` may go to device `d`."""
        return bool(self._allowed[i][d])

    def over(self) -> list[tuple[int, int]]:
        """Bytes above the limit and the limit, of each device."""
        return [(max(0, h - m), m) for h, m in zip(self.held, self._limits, strict=True)]


def _nets(step: StepProblem) -> list[tuple[int, tuple[int, ...], list[int]]]:
    """Maker, all ends, and price on each kind of link, ps, of what crosses between classes; outputs
    of one maker with the same ends are one net."""
    tasks, price = step.problem.core.tasks, step.prices.transfer_ns
    of_task = step.of_task.tolist()
    maker, ptr, cons = tasks.carrier_maker.tolist(), tasks.cons_ptr.tolist(), tasks.cons.tolist()
    joined: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for carrier, task in enumerate(maker):
        home = of_task[task]
        ends = {home, *(of_task[v] for v in cons[ptr[carrier] : ptr[carrier + 1]])}
        if len(ends) > 1:
            joined.setdefault((home, tuple(sorted(ends))), []).append(carrier)
    return [
        (home, ends, (price[:, carriers].sum(axis=1) * PS_PER_NS).tolist())
        for (home, ends), carriers in joined.items()
    ]


def improve(
    step: StepProblem,
    starts: list[I32],
    sizes: list[int],
    seconds: float,
    max_evaluations: int,
    seed: int,
) -> tuple[I32, int]:
    """Anneal from placements of classes in turn.

    Args:
        starts: `[M]` each.
        sizes: Bytes that each class is taken to hold.

    Returns:
        The best placement of classes by bytes above limits, then largest load; and moves tried.
    """
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds
    best = min(starts, key=lambda device: PairShares(step, device, sizes).mark())
    mark = PairShares(step, best, sizes).mark()
    spent, turn = 0, 0
    movable = int((step.allowed.sum(axis=1) > 1).sum())
    while movable and spent < max_evaluations and time.monotonic() < deadline:
        start = best if turn % 2 == 0 else starts[turn // 2 % len(starts)]
        most = len(best) * min(2 << turn, _STEPS_PER_ITEM * len(step.allowed[0]))
        steps = min(max_evaluations - spent, most)  # short runs first: they must end cold
        device, reached = anneal(PairShares(step, start, sizes), steps, deadline, rng)
        spent, turn = spent + steps, turn + 1
        if reached < mark:
            best, mark = device, reached
    return np.asarray(best, np.int32), spent
