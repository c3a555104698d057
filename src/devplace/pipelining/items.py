"""The moves of a max-load search: colocation classes as items, producers as nets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.pipelining.load_problem import I32, I64, LoadProblem, producer_ps


@dataclass(frozen=True, eq=False)
class Items:
    """A load problem with each co-location class joined into one item.

    A net is the output of one or more producers with the same ends: an accelerator that holds an
    end pays the net's cost once, unless all ends lie there. This is the same for producer and
    consumers. In shapes, `M` is items, `H` nets.

    Attributes:
        item: Item of each node. `[N]`
        accelerator_ps, cpu_ps, size_bytes: Sums over the item's nodes. `[M]`
        can_accelerate: 1 where all nodes of the item can run on an accelerator. `[M]`
        net_ptr: Ends of net `e` are `pins[net_ptr[e]:net_ptr[e + 1]]`. `[H + 1]`
        pins: Distinct items.
        net_ps: `[H]`
        order: Items from first to last: a topological order of the forward pass, with the backward
            pass taken in reverse. `[M]`
        before_src, before_dst: The precedences that `order` respects, as pairs of items; pairs
            inside a cycle of classes are left out.
        block: Items of one cycle of classes share a number; numbers rise along the order. `[M]`
    """

    item: I32
    accelerator_ps: I64
    cpu_ps: I64
    size_bytes: I64
    can_accelerate: NDArray[np.uint8]
    net_ptr: I32
    pins: I32
    net_ps: I64
    order: I32
    before_src: I32
    before_dst: I32
    block: I32
    num_accelerators: int
    num_cpus: int
    memory_bytes: int

    @property
    def num_items(self) -> int:
        """`M`"""
        return len(self.accelerator_ps)

    @property
    def num_devices(self) -> int:
        """`k + l`"""
        return self.num_accelerators + self.num_cpus

    def spread(self, device: I32) -> I32:
        """Device of each node from the device of each item. `[M]` to `[N]`"""
        return np.asarray(device, np.int32)[self.item]

    def gather(self, device: I32) -> I32:
        """Device of each item: that of its first node. `[N]` to `[M]`"""
        joined = np.zeros(self.num_items, np.int32)
        joined[self.item[::-1]] = np.asarray(device, np.int32)[::-1]
        return joined


def make_items(problem: LoadProblem) -> Items:
    """Join the classes of a problem and its producers' edges."""
    item = _classes(problem.color)
    count = int(item.max()) + 1 if len(item) else 0

    def total(values: I64) -> I64:
        sums = np.zeros(count, np.int64)
        np.add.at(sums, item, values)
        return sums

    able = np.ones(count, np.uint8)
    np.minimum.at(able, item, problem.can_accelerate.astype(np.uint8))
    net_ptr, pins, net_ps = _nets(problem, item)
    src, dst = _precedences(problem, item)
    block = _blocks(count, src, dst)
    order = np.argsort(block, kind="stable").astype(np.int32)
    across = block[src] != block[dst]
    return Items(
        item=item,
        accelerator_ps=total(problem.accelerator_ps),
        cpu_ps=total(problem.cpu_ps),
        size_bytes=total(problem.size_bytes),
        can_accelerate=able,
        net_ptr=net_ptr,
        pins=pins,
        net_ps=net_ps,
        order=order,
        before_src=src[across],
        before_dst=dst[across],
        block=block,
        num_accelerators=problem.num_accelerators,
        num_cpus=problem.num_cpus,
        memory_bytes=problem.memory_bytes,
    )


def _classes(color: I32) -> I32:
    """Item of each node, numbered by first appearance."""
    item = np.full(len(color), -1, np.int32)
    known: dict[int, int] = {}
    count = 0
    for node, shade in enumerate(color.tolist()):
        at = known.get(shade) if shade >= 0 else None
        if at is None:
            at, count = count, count + 1
            if shade >= 0:
                known[shade] = at
        item[node] = at
    return item


def _nets(problem: LoadProblem, item: I32) -> tuple[I32, I32, I64]:
    cost = producer_ps(problem)
    ends: dict[int, set[int]] = {}
    for src, dst in zip(problem.edge_src.tolist(), problem.edge_dst.tolist(), strict=True):
        ends.setdefault(src, {int(item[src])}).add(int(item[dst]))
    joined: dict[tuple[int, ...], int] = {}
    for src, reached in ends.items():
        if len(reached) > 1 and cost[src] > 0:
            key = tuple(sorted(reached))
            joined[key] = joined.get(key, 0) + int(cost[src])
    lengths = np.array([len(key) for key in joined], np.int64)
    net_ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    pins = np.array([v for key in joined for v in key], np.int32)
    return net_ptr, pins, np.array(list(joined.values()), np.int64)


def _precedences(problem: LoadProblem, item: I32) -> tuple[I32, I32]:
    """Pairs of items in pipeline order.

    Forward edges as they are. Backward nodes follow the forward nodes of their class; backward
    edges count, reversed, only where a class has no forward node.
    """
    src, dst, back = problem.edge_src, problem.edge_dst, problem.is_backward
    has_forward = np.zeros(int(item.max()) + 1 if len(item) else 0, np.bool_)
    has_forward[item[~back]] = True
    forward = ~back[src] & ~back[dst]
    backward = back[src] & back[dst] & ~(has_forward[item[src]] & has_forward[item[dst]])
    first = np.concatenate([item[src[forward]], item[dst[backward]]])
    second = np.concatenate([item[dst[forward]], item[src[backward]]])
    pairs = np.unique(np.stack([first, second], axis=1).reshape(-1, 2), axis=0)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32)


def _blocks(count: int, src: I32, dst: I32) -> I32:
    """Strongly connected components, numbered in topological order (Tarjan 1972, iterative)."""
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        after[a].append(b)
    index = [-1] * count
    low = [0] * count
    on_stack = [False] * count
    block = np.zeros(count, np.int32)
    stack: list[int] = []
    clock = done = 0
    for root in range(count - 1, -1, -1):
        if index[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            v, at = work.pop()
            if at == 0:
                index[v] = low[v] = clock
                clock += 1
                stack.append(v)
                on_stack[v] = True
            elif on_stack[after[v][at - 1]]:
                low[v] = min(low[v], low[after[v][at - 1]])
            if at < len(after[v]):
                work.append((v, at + 1))
                if index[after[v][at]] < 0:
                    work.append((after[v][at], 0))
                continue
            if low[v] == index[v]:
                while True:
                    u = stack.pop()
                    on_stack[u] = False
                    block[u] = done
                    if u == v:
                        break
                done += 1
    return (done - 1 - block).astype(np.int32)
