"""Plain Python search and contiguous split: slow, for machines without the native module."""

from __future__ import annotations

import math
import random
import time

import numpy as np

from devplace.pipelining.items import Items
from devplace.pipelining.load_problem import I32


class Shares:
    """Loads and held bytes of a placement of items, kept up to date under moves."""

    def __init__(self, items: Items, device: I32) -> None:
        self.items = items
        self.device = [int(d) for d in device]
        ends = np.split(items.pins, items.net_ptr[1:-1]) if len(items.net_ps) else []
        self.nets_of: list[list[int]] = [[] for _ in range(items.num_items)]
        for e, pins in enumerate(ends):
            for i in pins.tolist():
                self.nets_of[i].append(e)
        self.count = [[0] * items.num_devices for _ in ends]
        self.load = [0] * items.num_devices
        self.held = [0] * items.num_devices
        self._time = [items.accelerator_ps.tolist(), items.cpu_ps.tolist()]
        self._size, self._cost = items.size_bytes.tolist(), items.net_ps.tolist()
        for i, d in enumerate(self.device):
            self._put(i, d, 1)
            for e in self.nets_of[i]:
                self.count[e][d] += 1
        for e in range(len(ends)):
            self._pay(e, 1)

    def _put(self, i: int, d: int, sign: int) -> None:
        self.load[d] += sign * self._time[d >= self.items.num_accelerators][i]
        self.held[d] += sign * self._size[i]

    def _pay(self, e: int, sign: int) -> None:
        on = [d for d, held in enumerate(self.count[e]) if held]
        for d in on if len(on) > 1 else []:
            if d < self.items.num_accelerators:
                self.load[d] += sign * self._cost[e]

    def move(self, i: int, b: int) -> None:
        """Move item `i` to device `b`."""
        a = self.device[i]
        for e in self.nets_of[i]:
            self._pay(e, -1)
            self.count[e][a] -= 1
            self.count[e][b] += 1
            self._pay(e, 1)
        self._put(i, a, -1)
        self._put(i, b, 1)
        self.device[i] = b

    @property
    def num_items(self) -> int:
        """Items."""
        return len(self.device)

    def can(self, i: int, d: int) -> bool:
        """Whether item `i` may go to device `d`."""
        return d >= self.items.num_accelerators or bool(self.items.can_accelerate[i])

    def over(self) -> list[tuple[int, int]]:
        """Bytes above the limit and the limit, of each device that has one."""
        limit = self.items.memory_bytes
        return [(max(0, h - limit), limit) for h in self.held[: self.items.num_accelerators]]

    def mark(self) -> tuple[int, int]:
        """Bytes above the limits, then the largest load: smaller is better."""
        return sum(over for over, _ in self.over()), max(self.load)


def search(
    items: Items,
    starts: list[I32],
    seconds: float,
    max_evaluations: int,
    seed: int,
    bound_ps: int,
) -> tuple[I32, int, int, int]:
    """Anneal moves and swaps from each start in turn.

    Returns:
        Best placement of items, its bytes above the limits, its largest load, and evaluations.
    """
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds
    best = min(starts, key=lambda device: Shares(items, device).mark())
    mark = Shares(items, best).mark()
    spent, turn = 0, 0
    while spent < max_evaluations and time.monotonic() < deadline and mark > (0, bound_ps):
        start = best if turn % 2 else starts[turn // 2 % len(starts)]
        left = max_evaluations - spent
        steps = min(left, 40 * items.num_items * max(2, items.num_devices))
        device, reached = anneal(Shares(items, start), steps, deadline, rng)
        spent, turn = spent + steps, turn + 1
        if reached < mark:
            best, mark = device, reached
    return best, mark[0], mark[1], spent


def anneal(
    shares: Shares, steps: int, deadline: float, rng: random.Random
) -> tuple[I32, tuple[int, int]]:
    """Anneal a placement of items; the best one seen and its mark."""
    best, mark = list(shares.device), shares.mark()
    scale, power = max(1, mark[1]), rng.choice((8, 32, 128))
    now = _score(shares, scale, power)
    for step in range(steps):
        if step % 64 == 0 and time.monotonic() > deadline:
            break
        temperature = power * 0.05 * 0.004 ** (step / max(1, steps))
        moved = _change(shares, rng)
        if not moved:
            continue
        after = _score(shares, scale, power)
        if after > now and rng.random() >= math.exp(max(-700.0, (now - after) / temperature)):
            for i, d in reversed(moved):
                shares.move(i, d)
            continue
        now = after
        if shares.mark() < mark:
            best, mark = list(shares.device), shares.mark()
    return np.array(best, np.int32), mark


def _score(shares: Shares, scale: int, power: int) -> float:
    loads = sum(min(load / scale, 2.0) ** power for load in shares.load)
    return loads + sum(20 * power * over / max(1, limit) for over, limit in shares.over())


def _change(shares: Shares, rng: random.Random) -> list[tuple[int, int]]:
    """A random move or swap, made; the devices to go back to, or nothing where not allowed."""
    count = shares.num_items
    i, j = rng.randrange(count), rng.randrange(count)
    a = shares.device[i]
    b = shares.device[j] if rng.random() < 0.5 else rng.randrange(len(shares.load))
    swap = rng.random() < 0.3 and shares.device[j] == b
    if a == b or not shares.can(i, b) or (swap and not shares.can(j, a)):
        return []
    shares.move(i, b)
    if not swap:
        return [(i, a)]
    shares.move(j, a)
    return [(i, a), (j, b)]


def contiguous(items: Items) -> tuple[I32, int]:
    """Best split into runs of `items.order`, a programme over its prefixes.

    Returns:
        Placement of items (empty where none exists) and its largest load.
    """
    k, cpus = items.num_accelerators, items.num_cpus
    never = np.iinfo(np.int64).max
    order = items.order.tolist()
    ends = [
        at for at in range(1, len(order)) if items.block[order[at]] != items.block[order[at - 1]]
    ]
    ends = [0, *ends, len(order)]
    best: dict[tuple[int, int, int], int] = {(0, 0, 0): 0}
    came: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for low in ends[:-1]:
        states = [(a, c) for a in range(k + 1) for c in range(cpus + 1) if (low, a, c) in best]
        if not states:
            continue
        for high, on_accelerator, on_cpu in _runs(items, order, low, set(ends)):
            for a, c in states:
                for a2, c2, load in ((a + 1, c, on_accelerator), (a, c + 1, on_cpu)):
                    if a2 > k or c2 > cpus or load is None:
                        continue
                    value = max(best[low, a, c], load)
                    if value < best.get((high, a2, c2), never):
                        best[high, a2, c2] = value
                        came[high, a2, c2] = (low, a, c)
    last = [key for key in best if key[0] == len(order)]
    if not last:
        return np.zeros(0, np.int32), never
    at = min(last, key=lambda key: (best[key], key))
    value = best[at]
    device = np.zeros(items.num_items, np.int32)
    while at[0] > 0:
        low, a, c = came[at]
        device[order[low : at[0]]] = a if at[1] > a else k + c
        at = (low, a, c)
    return device, value


def _runs(
    items: Items, order: list[int], low: int, ends: set[int]
) -> list[tuple[int, int | None, int | None]]:
    """Loads of the runs that start at `low`: end, on an accelerator, on a CPU (None: cannot)."""
    nets_of: dict[int, list[int]] = {}
    for e in range(len(items.net_ps)):
        for i in items.pins[items.net_ptr[e] : items.net_ptr[e + 1]].tolist():
            nets_of.setdefault(i, []).append(e)
    inside: dict[int, int] = {}
    work = cpu = size = moved = 0
    able = items.num_accelerators > 0
    runs: list[tuple[int, int | None, int | None]] = []
    for at in range(low, len(order)):
        i = order[at]
        work, cpu = work + int(items.accelerator_ps[i]), cpu + int(items.cpu_ps[i])
        size += int(items.size_bytes[i])
        able = able and bool(items.can_accelerate[i]) and size <= items.memory_bytes
        for e in nets_of.get(i, ()):
            count, pins = inside.get(e, 0), int(items.net_ptr[e + 1] - items.net_ptr[e])
            inside[e] = count + 1
            moved += int(items.net_ps[e]) * (int(count + 1 < pins) - int(count > 0))
        if at + 1 in ends:
            runs.append((at + 1, work + moved if able else None, cpu if items.num_cpus else None))
    return runs
