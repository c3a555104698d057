"""Solve a block-latency problem: simple starts, a local search, and a lower bound."""

from __future__ import annotations

import math
import random
import time

import numpy as np

from devplace.pipelining.block_latency import (
    BlockGraph,
    BlockProblem,
    block_latency,
    make_block_graph,
    topological_order,
)
from devplace.pipelining.integer_programme import ExactAnswer, bin_packing
from devplace.pipelining.items import Items, make_items
from devplace.pipelining.load_bounds import why_infeasible
from devplace.pipelining.load_problem import (
    I32,
    I64,
    LoadProblem,
    broken_rule,
    check_devices,
    producer_ps,
)
from devplace.pipelining.native import solvers_module
from devplace.pipelining.solve import (
    DEFAULT_SECONDS,
    NEVER,
    LoadSolution,
    check_seconds,
    has_exact,
    solve_contiguous,
)
from devplace.pipelining.starts import simple_starts


def solve_latency(
    problem: BlockProblem,
    seconds: float | None = None,
    seed: int = 0,
    threads: int = 2,
    hint: I32 | None = None,
    max_evaluations: int | None = None,
) -> LoadSolution:
    """Smallest block latency found in the time given.

    The arguments are those of `devplace.pipelining.solve`.

    Raises:
        ProblemError: The hint does not fit the problem.
        InputError: `seconds` is not positive.
    """
    check_seconds(seconds)
    timed = seconds is not None or max_evaluations is None
    limit = (seconds or DEFAULT_SECONDS) if timed else 1e6
    given = [] if hint is None else [check_devices(problem, hint)]
    began = time.monotonic()
    items = make_items(problem)
    bound = latency_bound(problem, 0.1 * limit)
    tried = 0

    def answer(device: I32 | None, value: int | None, status: str, how: str) -> LoadSolution:
        took = time.monotonic() - began
        return LoadSolution(device, value, bound, status, took, seed, how, tried)

    reason = why_infeasible(items)
    if reason:
        return answer(None, None, "infeasible", reason)
    if problem.num_nodes == 0:
        return answer(np.zeros(0, np.int32), 0, "optimal", "nothing to place")
    starts = [items.gather(device) for device in given]
    starts += latency_starts(problem, items, 0.05 * limit)
    if all(broken_rule(problem, items.spread(start)) for start in starts):
        packed = _packed(items, 0.3 * limit if timed else None, seed, threads)
        if packed.status == "infeasible":
            how = "the sizes cannot be packed into the accelerators (CP-SAT)"
            return answer(None, None, "infeasible", how)
        if packed.device is not None:  # all CPUs are one device here
            most = problem.num_accelerators + int(problem.num_cpus > 0) - 1
            starts.append(np.minimum(packed.device, most).astype(np.int32))
    left = max(0.01, limit - (time.monotonic() - began)) if timed else limit
    most = 2**62 if max_evaluations is None else max_evaluations
    device, over, value, tried = _search(problem, items, starts, left, most, seed, threads, bound)
    if device is None or over:
        return answer(None, None, "unknown", "no placement within memory was found")
    spread = np.minimum(items.spread(device), problem.num_devices - 1).astype(np.int32)
    assert not broken_rule(problem, spread)
    return answer(spread, value, "optimal" if value <= bound else "feasible", "search")


def _packed(items: Items, seconds: float | None, seed: int, threads: int) -> ExactAnswer:
    """Any placement within memory, or a proof that there is none, where OR-Tools is installed;
    without `seconds` as much work as depends on the seed alone."""
    if not has_exact():
        return ExactAnswer(None, 0, "unknown")
    return bin_packing(items, seconds, 1 if seconds is None else threads, seed)


def latency_bound(problem: BlockProblem, seconds: float) -> int:
    """No placement has a smaller latency, ps.

    The larger of the longest path with the smaller time of each node, and, over all nodes, the
    smaller of a path through it on a CPU and of the least block that can hold it (a minimum cut).
    """
    if problem.num_nodes == 0:
        return 0
    alone = LoadProblem(
        **{
            **{name: getattr(problem, name) for name in LoadProblem.__dataclass_fields__},
            "color": np.full(problem.num_nodes, -1, np.int32),
        }
    )
    items = make_items(alone)
    able = problem.can_accelerate & (problem.size_bytes <= problem.memory_bytes)
    able = able & (problem.num_accelerators > 0)
    cpu = problem.cpu_ps if problem.num_cpus else np.full(problem.num_nodes, NEVER, np.int64)
    least = np.where(able, np.minimum(problem.accelerator_ps, cpu), problem.cpu_ps)
    through = _through(problem, least) - least
    bound = int((through + least).max())
    native = solvers_module()
    if native is None:
        return bound
    deadline = time.monotonic() + seconds
    heavy = np.where(able, problem.accelerator_ps + _touching(problem), 0)
    for v in np.argsort(-heavy, kind="stable").tolist():
        if heavy[v] <= bound or time.monotonic() > deadline:
            break
        block = int(native.least_load(items, v))
        on_cpu = int(through[v] + cpu[v]) if problem.num_cpus else NEVER
        bound = max(bound, min(block, on_cpu))
    return bound


def _touching(problem: LoadProblem) -> I64:
    """Cost of the nets at each node: its own output and those that feed it. `[N]`"""
    cost = producer_ps(problem)
    total = np.zeros(problem.num_nodes, np.int64)
    pairs = {(int(a), int(b)) for a, b in zip(problem.edge_src, problem.edge_dst, strict=True)}
    for a, b in pairs:
        total[b] += cost[a]
    total += cost
    return total


def _through(problem: LoadProblem, length: I64) -> I64:
    """Longest path through each node, the node included. `[N]`"""
    before, after = np.zeros_like(length), np.zeros_like(length)
    feeds: list[list[int]] = [[] for _ in range(problem.num_nodes)]
    for a, b in zip(problem.edge_src.tolist(), problem.edge_dst.tolist(), strict=True):
        feeds[b].append(a)
    order = topological_order(problem).tolist()
    for v in order:
        before[v] = max((before[u] + length[u] for u in feeds[v]), default=0)
    for v in reversed(order):
        for u in feeds[v]:
            after[u] = max(after[u], after[v] + length[v])
    return before + length + after


def latency_starts(problem: BlockProblem, items: Items, seconds: float) -> list[I32]:
    """Accelerators filled in order, the best contiguous max-load split, and simple splits."""
    starts = [fill_in_order(items)]
    split = solve_contiguous(problem, seconds)
    if split.device is not None:
        starts.append(items.gather(split.device))
    starts += simple_starts(items)
    if problem.num_cpus:
        starts.append(np.full(items.num_items, problem.num_accelerators, np.int32))
    most = problem.num_accelerators + int(problem.num_cpus > 0) - 1
    return [np.minimum(device, most).astype(np.int32) for device in starts]


def fill_in_order(items: Items) -> I32:
    """Fill one accelerator after the other to its memory limit; the rest goes to the CPU.

    Source: the greedy baseline of Tarnawski et al. (2020).
    """
    k = items.num_accelerators
    device = np.full(items.num_items, items.num_devices - 1, np.int32)
    blocks = [np.flatnonzero(items.block == b) for b in np.unique(items.block)]
    d, free = 0, items.memory_bytes
    for block in blocks:
        size = int(items.size_bytes[block].sum())
        if size > items.memory_bytes or not items.can_accelerate[block].all():
            continue
        if size > free:
            d, free = d + 1, items.memory_bytes
        if d >= k:
            break
        device[block] = d
        free -= size
    return device


def _search(
    problem: BlockProblem,
    items: Items,
    starts: list[I32],
    seconds: float,
    most: int,
    seed: int,
    threads: int,
    bound: int,
) -> tuple[I32 | None, int, int, int]:
    """Placement of items, bytes above limits, latency, and moves tried."""
    graph = make_block_graph(problem)
    unable, k = items.can_accelerate == 0, problem.num_accelerators
    starts = [device for device in starts if not (device[unable] < k).any()]
    native = solvers_module()
    if native is None:
        return _plain_search(problem, graph, starts, seconds, most, seed, bound)
    flat = np.concatenate(starts).astype(np.int32)
    found = native.search_blocks(graph, flat, seconds, most, seed, threads, bound)
    device, over, value, tried = found
    return (device if len(device) else None), int(over), int(value), int(tried)


def _plain_search(
    problem: BlockProblem,
    graph: BlockGraph,
    starts: list[I32],
    seconds: float,
    most: int,
    seed: int,
    bound: int,
) -> tuple[I32 | None, int, int, int]:
    """Anneal single moves from the best start; slow, for machines without the native module."""
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds

    def mark(device: I32) -> tuple[int, int]:
        nodes = device[graph.item]
        held = np.bincount(nodes, graph.size_bytes, graph.num_devices)[: graph.num_accelerators]
        latency = block_latency(problem, nodes)
        over = int(np.maximum(held - graph.memory_bytes, 0).sum())
        return (NEVER, NEVER) if latency is None else (over, latency)

    best = min(starts, key=mark)
    reached = mark(best)
    now, here, temperature = best.copy(), reached, 0.05
    unable = np.ones(len(best), np.bool_)
    np.minimum.at(unable, graph.item, graph.can_accelerate.astype(np.bool_))
    tried = 0
    while tried < most:
        if time.monotonic() > deadline or reached <= (0, bound):
            break
        tried += 1
        i, d = rng.randrange(len(now)), rng.randrange(graph.num_devices)
        if d < graph.num_accelerators and not unable[i]:
            continue
        old, now[i] = now[i], d
        after = mark(now)
        worse = (after[1] - here[1]) / max(1, here[1]) + 2.0 * (after[0] > here[0])
        if worse > 0 and rng.random() >= math.exp(max(-700.0, -worse / temperature)):
            now[i] = old
            continue
        here, temperature = after, max(0.0005, temperature * 0.999)
        if here < reached:
            best, reached = now.copy(), here
    return (best if reached[1] < NEVER else None), *reached, tried
