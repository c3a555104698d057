"""Tiny random load problems, and slow obvious forms of what the load room computes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from devplace.pipelining import BlockProblem, LoadProblem, broken_rule, loads


@contextmanager
def native(wanted: bool) -> Iterator[None]:
    """Run with or without the compiled solvers."""
    before = os.environ.get("DEVPLACE_NATIVE")
    os.environ["DEVPLACE_NATIVE"] = "1" if wanted else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DEVPLACE_NATIVE"]
        else:
            os.environ["DEVPLACE_NATIVE"] = before


def random_problem(seed: int, backward: bool = True, kind: type[LoadProblem] = LoadProblem):
    """At most 7 nodes and 3 devices; classes, CPU-only nodes, tight memory and zero costs occur."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 8))
    k = int(rng.integers(0, 4))
    cpus = int(rng.integers(0 if k else 1, 2 if k > 1 else 3))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.4]
    cost = rng.integers(0, 12, n)
    size = rng.integers(0, 10, n)
    return kind(
        accelerator_ps=rng.integers(0, 20, n),
        cpu_ps=rng.integers(0, 60, n),
        can_accelerate=rng.random(n) < 0.85,
        size_bytes=size,
        edge_src=np.array([a for a, _ in pairs], np.int32),
        edge_dst=np.array([b for _, b in pairs], np.int32),
        edge_ps=np.array([cost[a] for a, _ in pairs], np.int64),
        color=np.where(rng.random(n) < 0.4, rng.integers(0, 3, n), -1),
        is_backward=(np.arange(n) >= n // 2) & (rng.random() < 0.5) & backward,
        num_accelerators=k,
        num_cpus=cpus,
        memory_bytes=int(rng.integers(0, 1 + int(size.sum()))),
    )


def random_block_problem(seed: int) -> BlockProblem:
    """A tiny problem for one sample."""
    return random_problem(seed, backward=False, kind=BlockProblem)


def placements(problem: LoadProblem) -> Iterator[np.ndarray]:
    """Every valid placement."""
    for row in itertools.product(range(problem.num_devices), repeat=problem.num_nodes):
        device = np.array(row, np.int32)
        if not broken_rule(problem, device):
            yield device


def best_load(problem: LoadProblem) -> int | None:
    """Smallest largest load over all placements; None where there is none."""
    return min((int(loads(problem, device).max()) for device in placements(problem)), default=None)


def slow_loads(problem: LoadProblem, device: np.ndarray) -> list[int]:
    """Loads by the definition, one device at a time."""
    result = []
    edges = list(zip(problem.edge_src, problem.edge_dst, problem.edge_ps, strict=True))
    for d in range(problem.num_devices):
        own = {v for v in range(problem.num_nodes) if device[v] == d}
        if d >= problem.num_accelerators:
            result.append(sum(int(problem.cpu_ps[v]) for v in own))
            continue
        load = sum(int(problem.accelerator_ps[v]) for v in own)
        for u in range(problem.num_nodes):
            cost = max((int(c) for a, _, c in edges if a == u), default=0)
            feeds = any(a == u and u not in own and b in own for a, b, _ in edges)
            leaves = any(a == u and u in own and b not in own for a, b, _ in edges)
            load += cost * (feeds or leaves)
        result.append(load)
    return result
