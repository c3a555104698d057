"""Longest paths that pay for what crosses links, and for ops that wait for each other.

`head[v, k]` is a time before which op `v` cannot begin if it runs on a device of kind `k`, and
`tail[v, k]` one that has to follow it. An input made elsewhere has to cross a link. Inputs made on
the same device come one after the other, where the device runs one op at a time. Which of them are
made there is chosen for each op as is best for it:

    head[v, k] = min over S of max(shortest sequence of the makers in S on k, arrivals of the rest)

Best are sets `S` of the makers whose outputs would arrive last, so only these are tried. Tails are
the same, seen from the end: readers on the same device follow each other.

Source: the idea of Jung, Kirousis and Spirakis (1989), "Lower bounds and efficient algorithms for
multiprocessor scheduling of DAGs with communication delays", doi:10.1145/72935.72962. Differs from
it in: devices are few and unequal, links too, and copies of an op are not made; only direct
predecessors are put into sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = 2**61
MAX_KINDS = 4
# Makers of one op that are put into sequence: more hardly ever helps.
MAX_LOCAL = 5


@dataclass(frozen=True, eq=False)
class Kinds:
    """Devices that are alike for this problem, taken together.

    Attributes:
        of_device: Kind of each usable device, -1 for others. `[D]`
        duration_ns: Shortest time of each task on a device of the kind; `NEVER` where it may not
            go. `[K, N]`
        way_ns: Shortest time from the end of an op on one kind until an op on another device, of
            the other kind, has what it made. `[K, K, T]`
        is_serial: Whether all devices of the kind run one op at a time. `[K]`
        streams: Streams of all devices of the kind together. int64 `[K]`
    """

    of_device: NDArray[np.int32]
    duration_ns: I64
    way_ns: I64
    is_serial: list[bool]
    streams: I64


@dataclass(frozen=True, eq=False)
class Paths:
    """Heads and tails of tasks, by kind of device. `[K, N]`"""

    head_ns: I64
    tail_ns: I64
    kinds: Kinds

    @property
    def longest_ns(self) -> int:
        """The longest path, every task where it shortens it most."""
        total = self.head_ns + self.kinds.duration_ns + self.tail_ns
        return int(total.min(axis=0, initial=NEVER).max(initial=0))


def communication_paths(problem: Problem, allowed: Bools) -> Paths:
    """Heads and tails of all tasks.

    Args:
        problem: What is placed.
        allowed: Devices each group may go to, at least one each. `[G, D]`

    Complexity: O(K^2 E), 0.1 s for 12,000 ops on machines of GPUs and a CPU.
    """
    tasks = problem.core.tasks
    kinds = make_kinds(problem, allowed)
    count = tasks.num_tasks
    makers = tasks.carrier_maker[tasks.in_carrier]
    head = _sweep(
        range(count), tasks.in_ptr, makers, tasks.in_carrier, kinds, kinds.way_ns, tasks.group
    )
    readers_ptr = tasks.cons_ptr[tasks.out_ptr]
    carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
    back = np.ascontiguousarray(kinds.way_ns.transpose(1, 0, 2))
    tail = _sweep(
        range(count - 1, -1, -1), readers_ptr, tasks.cons, carrier, kinds, back, tasks.group
    )
    return Paths(head, tail, kinds)


def make_kinds(problem: Problem, allowed: Bools) -> Kinds:
    """Kinds of devices: the same times and the same groups; at most `MAX_KINDS`, the last of
    which takes all the rest."""
    tasks, wires = problem.core.tasks, problem.core.wires
    of_device = np.full(len(wires.streams), -1, np.int32)
    known: dict[tuple[bytes, bytes, bool], int] = {}
    for d in problem.usable_devices:
        key = (
            wires.duration_ns[:, d].tobytes(),
            allowed[:, d].tobytes(),
            int(wires.streams[d]) == 1,
        )
        of_device[d] = min(known.setdefault(key, len(known)), MAX_KINDS - 1)
    count = min(len(known), MAX_KINDS)
    duration = np.full((count, tasks.num_tasks), NEVER, np.int64)
    for d in problem.usable_devices:
        own = np.where(allowed[tasks.group, d], wires.duration_ns[:, d], NEVER)
        duration[of_device[d]] = np.minimum(duration[of_device[d]], own)
    serial = [bool((wires.streams[of_device == k] == 1).all()) for k in range(count)]
    inside = of_device >= 0
    streams = np.bincount(of_device[inside], wires.streams[inside], count).astype(np.int64)
    return Kinds(of_device, duration, _ways(problem, of_device, count), serial, streams)


def _ways(problem: Problem, of_device: NDArray[np.int32], count: int) -> I64:
    """A receiver with one stream pays the overhead before its first op that starts after the
    arrival ends, so no reader there ends before both are over."""
    wires = problem.core.wires
    transfers = problem.core.transfers
    way = np.full((count, count, transfers.transfer_ns.shape[1]), NEVER, np.int64)
    done: set[tuple[int, int, int, int, bool]] = set()
    for d in problem.usable_devices:
        for e in problem.usable_devices:
            if d == e:
                continue
            kind, wait = int(transfers.link_class[d, e]), int(transfers.latency_ns[d, e])
            j, k, pays = int(of_device[d]), int(of_device[e]), int(wires.streams[e]) == 1
            if (j, k, kind, wait, pays) in done:
                continue
            done.add((j, k, kind, wait, pays))
            own = transfers.way_ns(d, e) + (transfers.receive_ns[kind] if pays else 0)
            way[j, k] = np.minimum(way[j, k], own)
    return way


def _sweep(
    order: Iterable[int],
    ptr: NDArray[np.integer],
    near: NDArray[np.integer],
    carrier: NDArray[np.integer],
    kinds: Kinds,
    way_ns: I64,
    group: NDArray[np.int32],
) -> I64:
    """Heads by going forward over what each task reads, tails by going back over its readers."""
    begin, other, cargo, of = ptr.tolist(), near.tolist(), carrier.tolist(), group.tolist()
    length, way = kinds.duration_ns.tolist(), way_ns.tolist()
    span = range(len(length))
    found = [[0] * len(of) for _ in span]
    ends = [row.copy() for row in length]
    for v in order:
        first, last = begin[v], begin[v + 1]
        if first == last:
            continue
        pairs = [(other[i], cargo[i]) for i in range(first, last)]
        home = of[v]
        for k in span:
            arrival: dict[int, int] = {}
            for u, c in pairs:
                far = NEVER
                if of[u] != home:
                    far = min([ends[j][u] + way[j][k][c] for j in span])
                arrival[u] = max(far, arrival.get(u, 0))
            rows = [(far, found[k][u], length[k][u]) for u, far in arrival.items()]
            value = min(NEVER, _begin(rows, kinds.is_serial[k]))
            found[k][v] = value
            ends[k][v] = value + length[k][v]
    return np.array(found, np.int64).reshape(len(length), len(of))


def _begin(rows: list[tuple[int, int, int]], is_serial: bool) -> int:
    """Earliest begin after makers given as (arrival from elsewhere, begin here, length here)."""
    if len(rows) == 1:
        far, begin, length = rows[0]
        return min(far, begin + length)
    least = max([min(far, begin + length) for far, begin, length in rows])
    if not is_serial:
        return least
    rows.sort(reverse=True)
    best = rows[0][0]
    local: list[tuple[int, int]] = []
    for place in range(min(len(rows), MAX_LOCAL)):
        local.append(rows[place][1:])
        spent = max([b + sum([n for other, n in local if other >= b]) for b, _ in local])
        rest = rows[place + 1][0] if place + 1 < len(rows) and place + 1 < MAX_LOCAL else 0
        best = min(best, max(spent, rest))
        if spent >= best:
            break
    return max(best, least)
