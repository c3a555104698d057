"""Block latency: how long one sample takes when accelerators work in blocks of whole subgraphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from devplace.errors import ProblemError
from devplace.pipelining.items import make_items
from devplace.pipelining.load_problem import I32, I64, LoadProblem, check_devices, producer_ps


@dataclass(frozen=True, eq=False)
class BlockProblem(LoadProblem):
    """A load problem whose objective is the latency of one sample.

    The fields are those of `LoadProblem`. All CPUs together are device `k`: their nodes run with
    unlimited parallelism, each as soon as its inputs are there, so that `num_cpus` only says
    whether there is one. An accelerator's nodes are cut into contiguous pieces (`pieces`). A piece
    starts when all its inputs are there and takes, as one block, the cost of each distinct outside
    node that feeds it, the time of its nodes, and the cost of each own node with an edge that
    leaves it. The value is the last finish.

    Raises:
        ProblemError: As for `LoadProblem`; also for backward nodes and cycles.

    Source: Tarnawski et al. (2020), arXiv 2006.16423, latency objective. Differs from its integer
    programme in: any number of pieces for each accelerator.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_backward.any():
            node = int(np.flatnonzero(self.is_backward)[0])
            raise ProblemError(f"Block latency is for inference: node {node} is a backward node.")
        topological_order(self)


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """The arrays of a block problem as the native search takes them.

    Attributes:
        item: Item (co-location class) of each node. `[N]`
        order: Nodes in topological order. `[N]`
        in_ptr, sources: Distinct producers that feed node `v`: `sources[in_ptr[v]:in_ptr[v + 1]]`.
        out_ptr, targets: The same for consumers.
        producer_ps: Cost of moving each node's output. `[N]`
        num_devices: `k`, and one more if there is a CPU.
    """

    item: I32
    order: I32
    in_ptr: I32
    sources: I32
    out_ptr: I32
    targets: I32
    accelerator_ps: I64
    cpu_ps: I64
    size_bytes: I64
    producer_ps: I64
    can_accelerate: Any
    num_accelerators: int
    num_devices: int
    memory_bytes: int


def make_block_graph(problem: BlockProblem) -> BlockGraph:
    """Arrays of a problem for the native search."""
    pairs = np.unique(np.stack([problem.edge_src, problem.edge_dst], axis=1).reshape(-1, 2), axis=0)
    n = problem.num_nodes

    def neighbours(of: I32, other: I32) -> tuple[I32, I32]:
        sort = np.argsort(of, kind="stable")
        ptr = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=n))]).astype(np.int32)
        return ptr, np.ascontiguousarray(other[sort], np.int32)

    in_ptr, sources = neighbours(pairs[:, 1], pairs[:, 0])
    out_ptr, targets = neighbours(pairs[:, 0], pairs[:, 1])
    return BlockGraph(
        item=make_items(problem).item,
        order=topological_order(problem),
        in_ptr=in_ptr,
        sources=sources,
        out_ptr=out_ptr,
        targets=targets,
        accelerator_ps=problem.accelerator_ps,
        cpu_ps=problem.cpu_ps,
        size_bytes=problem.size_bytes,
        producer_ps=producer_ps(problem),
        can_accelerate=problem.can_accelerate.astype(np.uint8),
        num_accelerators=problem.num_accelerators,
        num_devices=problem.num_accelerators + int(problem.num_cpus > 0),
        memory_bytes=problem.memory_bytes,
    )


def topological_order(problem: LoadProblem) -> I32:
    """Nodes in topological order, depth first. `[N]`

    Raises:
        ProblemError: The edges form a cycle.
    """
    after: list[list[int]] = [[] for _ in range(problem.num_nodes)]
    missing = [0] * problem.num_nodes
    for a, b in zip(problem.edge_src.tolist(), problem.edge_dst.tolist(), strict=True):
        after[a].append(b)
        missing[b] += 1
    ready = [v for v in range(problem.num_nodes - 1, -1, -1) if missing[v] == 0]
    order: list[int] = []
    while ready:
        v = ready.pop()
        order.append(v)
        for w in after[v]:
            missing[w] -= 1
            if missing[w] == 0:
                ready.append(w)
    if len(order) < problem.num_nodes:
        node = next(v for v, count in enumerate(missing) if count)
        raise ProblemError(f"Block latency needs a graph without cycles: node {node} is on one.")
    return np.array(order, np.int32)


def pieces(problem: BlockProblem, device: I32) -> I32:
    """Piece of each accelerator node on its device, from 0; -1 for CPU nodes. `[N]`

    A node is in the piece after a node of its own device when some path between them leaves the
    device; otherwise in the latest piece of its device among its ancestors. A contiguous share is
    one piece.
    """
    device = check_devices(problem, device)
    k = problem.num_accelerators
    feeds: list[list[int]] = [[] for _ in range(problem.num_nodes)]
    for a, b in zip(problem.edge_src.tolist(), problem.edge_dst.tolist(), strict=True):
        feeds[b].append(a)
    reached = np.zeros((problem.num_nodes, max(1, k)), np.int32)
    piece = np.full(problem.num_nodes, -1, np.int32)
    for v in topological_order(problem).tolist():
        for u in feeds[v]:
            np.maximum(reached[v], reached[u], out=reached[v])
        d = device[v]
        if d < k:
            own = [int(reached[u, d]) + int(device[u] != d) for u in feeds[v]]
            reached[v, d] = max([1, *own])
            piece[v] = reached[v, d] - 1
    return piece


def block_latency(problem: BlockProblem, device: I32) -> int | None:
    """Latency of one sample, ps; None where pieces wait for each other and never start.

    Args:
        device: Device of each node: accelerators `0..k-1`; any other is the CPU. `[N]`

    Raises:
        ProblemError: A device index is out of range.
    """
    device = check_devices(problem, device)
    piece = pieces(problem, device)
    k = problem.num_accelerators
    unit = [
        (int(d), int(p)) if d < k else (k, v)
        for v, (d, p) in enumerate(zip(device, piece, strict=True))
    ]
    length: dict[tuple[int, int], int] = dict.fromkeys(unit, 0)
    for v, u in enumerate(unit):
        length[u] += int((problem.accelerator_ps if u[0] < k else problem.cpu_ps)[v])
    cost = producer_ps(problem)
    feeds: dict[tuple[int, int], set[tuple[int, int]]] = {u: set() for u in unit}
    moved: set[tuple[int, tuple[int, int]]] = set()
    for a, b in zip(problem.edge_src.tolist(), problem.edge_dst.tolist(), strict=True):
        if unit[a] != unit[b]:
            feeds[unit[b]].add(unit[a])
            moved.update(((a, unit[a]), (a, unit[b])))
    for a, u in moved:
        if u[0] < k:
            length[u] += int(cost[a])
    return _longest_path(length, feeds)


def _longest_path(
    length: dict[tuple[int, int], int], feeds: dict[tuple[int, int], set[tuple[int, int]]]
) -> int | None:
    finish: dict[tuple[int, int], int] = {}
    left = set(length)
    while left:
        ready = [u for u in left if feeds[u] <= finish.keys()]
        if not ready:
            return None
        for u in ready:
            finish[u] = length[u] + max((finish[w] for w in feeds[u]), default=0)
        left -= set(ready)
    return max(finish.values(), default=0)
