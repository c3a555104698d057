"""Stages with tensor and data parallelism and choices per node (Piper)."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplace.errors import ProblemError
from devplace.pipelining import (
    StageVariant,
    TensorStageProblem,
    evaluate_stage,
    solve_tensor_stages,
)
from devplace.pipelining.variants import cheapest_fit


def random_stages(seed: int) -> TensorStageProblem:
    """At most 4 nodes and 5 devices; two variants, degrees 1 and 2, tight memory."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.6]

    def variant(name: str, node: int) -> StageVariant:
        return StageVariant(
            name,
            float(rng.integers(1, 30)),
            float(rng.integers(0, 20)),
            float(rng.integers(0, 6)),
            float(rng.integers(0, 6)),
            {a: float(rng.integers(0, 5)) for a, b in pairs if b == node},
            {b: float(rng.integers(0, 5)) for a, b in pairs if a == node},
        )

    def row(node: int) -> dict[int, tuple[StageVariant, ...]]:
        degrees = [1, 2] if rng.random() < 0.7 else [1]
        return {t: (variant("plain", node), variant("small", node)) for t in degrees}

    return TensorStageProblem(
        variants=tuple(row(node) for node in range(n)),
        edge_src=tuple(a for a, _ in pairs),
        edge_dst=tuple(b for _, b in pairs),
        edge_bytes=tuple(float(rng.integers(0, 10)) for _ in pairs),
        num_devices=int(rng.integers(1, 6)),
        memory_bytes=float(rng.integers(3, 60)),
        bandwidth=2.0,
        batch=int(rng.integers(1, 7)),
    )


def brute_force(problem: TensorStageProblem) -> float | None:
    """All stages of all nodes, degrees and variants."""
    n, k = len(problem.variants), problem.num_devices
    edges = list(zip(problem.edge_src, problem.edge_dst, strict=True))
    best = None
    for row in itertools.product(range(min(n, k)), repeat=n):
        used = max(row) + 1
        if len(set(row)) < used or any(row[a] > row[b] for a, b in edges):
            continue
        shares = [tuple(v for v in range(n) if row[v] == s) for s in range(used)]
        degrees = [d for d in range(1, k + 1) if problem.batch % d == 0]
        for choice in itertools.product(itertools.product((1, 2), degrees), repeat=used):
            if sum(t * d for t, d in choice) > k or sum(d for _, d in choice) > problem.batch:
                continue
            value = _value(problem, shares, choice)
            if value is not None and (best is None or value < best):
                best = value
    return best


def _value(problem, shares, choice) -> float | None:
    worst = 0.0
    for s, (nodes, (t, d)) in enumerate(zip(shares, choice, strict=True)):
        if any(t not in problem.variants[v] for v in nodes):
            return None
        in_flight = -(-sum(d for _, d in choice[s:]) // d)
        times = []
        for names in itertools.product(("plain", "small"), repeat=len(nodes)):
            took, held = evaluate_stage(problem, nodes, t, d, names, in_flight)
            if held <= problem.memory_bytes:
                times.append(took)
        if not times:
            return None
        worst = max(worst, min(times))
    return worst


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_plan_equals_brute_force(seed):
    """The best value is found to the precision asked for, within memory and devices."""
    problem = random_stages(seed)
    best, solution = brute_force(problem), solve_tensor_stages(problem)
    if best is None:
        assert solution.stages is None
        assert solution.status == "infeasible"
        return
    assert solution.stages is not None
    assert solution.status == "optimal"
    assert solution.value_s == pytest.approx(best, rel=1e-6)
    assert solution.bound_s <= best * (1 + 1e-12)
    assert sum(s.tensor_degree * s.data_degree for s in solution.stages) <= problem.num_devices
    assert all(s.memory_bytes <= problem.memory_bytes * (1 + 1e-9) for s in solution.stages)
    placed = sorted(v for stage in solution.stages for v in stage.nodes)
    assert placed == list(range(len(problem.variants)))


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_choice_of_variants_equals_brute_force(seed):
    """Branch and bound finds the least time that fits, also among equal nodes."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    kinds = [
        (rng.integers(0, 20, 3).astype(float), rng.integers(0, 20, 3).astype(float))
        for _ in range(2)
    ]
    rows = [kinds[int(rng.integers(0, 2))] for _ in range(n)]
    times, held = [t.tolist() for t, _ in rows], [h.tolist() for _, h in rows]
    least = sum(min(row) for row in held)
    limit = float(rng.integers(least, least + 60))
    chosen, exact = cheapest_fit(times, held, limit)
    assert sum(row[j] for row, j in zip(held, chosen, strict=True)) <= limit
    totals = [
        sum(row[j] for row, j in zip(times, pick, strict=True))
        for pick in itertools.product(range(3), repeat=n)
        if sum(row[j] for row, j in zip(held, pick, strict=True)) <= limit
    ]
    got = sum(row[j] for row, j in zip(times, chosen, strict=True))
    assert got == min(totals) if exact else got >= min(totals)


def test_malformed_stages_are_refused():
    """Edges to unknown nodes, missing bytes and no devices are named."""
    fields = dict(
        variants=({1: (StageVariant("plain", 1.0, 0.0, 0.0, 0.0, {}, {}),)},),
        edge_src=(),
        edge_dst=(),
        edge_bytes=(),
        num_devices=1,
        memory_bytes=1.0,
        bandwidth=1.0,
        batch=1,
    )
    assert solve_tensor_stages(TensorStageProblem(**fields)).value_s == 1.0
    with pytest.raises(ProblemError, match="Edge 0 to 3"):
        TensorStageProblem(**{**fields, "edge_src": (0,), "edge_dst": (3,), "edge_bytes": (1.0,)})
    with pytest.raises(ProblemError, match="one value for each edge"):
        TensorStageProblem(**{**fields, "edge_bytes": (1.0,)})
    with pytest.raises(ProblemError, match="got 1 nodes, 0 devices"):
        TensorStageProblem(**{**fields, "num_devices": 0})
