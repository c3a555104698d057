"""Small random instances: solvers against all solutions, each valued by the verifier."""

import itertools

import numpy as np
import pytest

from devplace.bench import Effort, solve
from devplace.bench.simple import contiguous_blocks
from devplace.instances.records import (
    About,
    DataflowInstance,
    Layer,
    LoadInstance,
    LoadNode,
    PipelineInstance,
    Variant,
    VariantInstance,
    VariantNode,
)
from devplace.placers import Budget
from devplace.verify import (
    Stage,
    verify_latency,
    verify_makespan,
    verify_pipeline,
    verify_throughput,
    verify_variants,
)

HERE = About("random", "random.json")
ENOUGH = Effort(Budget(seconds=20), threads=1)
"""For what ends with a proof, long before."""
MIXED = Effort(Budget(seconds=5), threads=1)
"""For what searches in a tenth of it, and then proves."""
COUNTED = Effort(Budget(evaluations=60_000), threads=1)


def edges_of(rng, count):
    """A random acyclic graph."""
    pairs = itertools.combinations(range(count), 2)
    return tuple(pair for pair in pairs if rng.random() < 0.4)


def load_instance(rng, objective):
    """Up to six nodes on two accelerators and at most one CPU, memory often tight."""
    count = int(rng.integers(1, 7))
    nodes = tuple(
        LoadNode(
            v,
            str(v),
            float(rng.integers(0, 20)) / 4,
            float(rng.integers(0, 80)) / 4,
            float(rng.integers(0, 5)),
            float(rng.integers(0, 8)) / 4,
            bool(rng.random() < 0.9),
            False,
            int(rng.integers(0, 3)) if rng.random() < 0.4 else None,
        )
        for v in range(count)
    )
    memory, cpus = float(rng.integers(3, 12)), int(rng.random() < 0.6)
    return LoadInstance(HERE, nodes, edges_of(rng, count), 2, cpus, memory, objective)


def best(verdicts):
    """The smallest value of those that break no rule."""
    return min((found.value for found in verdicts if found.is_valid), default=None)


def check(row, optimum):
    """Never below the optimum, nothing claimed that is not so."""
    if optimum is None:
        assert row.value is None
        return
    assert row.status in ("optimal", "feasible")
    assert row.value >= optimum - 1e-9
    assert row.bound is None or row.bound <= optimum + 1e-9
    if row.status == "optimal":
        assert row.value == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_throughput(seed):
    """The search finds the optimum, and proves infeasible what has no placement."""
    instance = load_instance(np.random.default_rng(seed), "throughput")
    devices = range(instance.num_accelerators + instance.num_cpus)
    splits = itertools.product(devices, repeat=len(instance.nodes))
    optimum = best(verify_throughput(instance, split) for split in splits)
    row = solve(instance, MIXED)
    check(row, optimum)
    if optimum is None:
        assert row.status == "infeasible"
    else:
        assert row.value == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("seed", range(25))
def test_latency(seed):
    """Over all splits, each cut into contiguous pieces."""
    instance = load_instance(np.random.default_rng(seed), "latency")
    devices = range(instance.num_accelerators + instance.num_cpus)
    splits = itertools.product(devices, repeat=len(instance.nodes))
    optimum = best(
        verify_latency(instance, split, contiguous_blocks(instance, split)) for split in splits
    )
    row = solve(instance, COUNTED)
    check(row, optimum)
    if optimum is not None:
        assert row.value == pytest.approx(optimum, abs=1e-9)


def cuts(count, edges):
    """All ways to cut a graph into consecutive stages."""
    for of in itertools.product(range(count), repeat=count):
        used = sorted(set(of))
        if used == list(range(len(used))) and all(of[a] <= of[b] for a, b in edges):
            yield [tuple(v for v in range(count) if of[v] == s) for s in used]


@pytest.mark.parametrize("seed", range(15))
def test_replicated_stages(seed):
    """PipeDream's objective over all stages and replicas."""
    rng = np.random.default_rng(seed)
    count, devices = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    layers = tuple(
        Layer(str(v), str(v), *(float(x) for x in rng.integers(0, 50, 3))) for v in range(count)
    )
    scale = float(rng.choice([0.0, 1.0]))
    instance = PipelineInstance(
        HERE, layers, edges_of(rng, count), devices, 5000.0, edge_cost_scale=scale
    )
    found = [
        verify_pipeline(
            instance, [Stage(nodes, r) for nodes, r in zip(stages, counts, strict=True)]
        )
        for stages in cuts(count, instance.edges)
        for counts in itertools.product(range(1, devices + 1), repeat=len(stages))
    ]
    row = solve(instance, ENOUGH)
    check(row, best(found))
    assert row.value == pytest.approx(best(found), abs=1e-9)


@pytest.mark.parametrize("seed", range(15))
def test_stages_with_variants(seed):
    """Piper's objective over all stages, degrees and variants."""
    rng = np.random.default_rng(seed)
    count, batch = int(rng.integers(1, 4)), int(rng.choice([2, 4, 6]))
    edges = tuple((a, b, float(rng.integers(0, 30))) for a, b in edges_of(rng, count))
    nodes = []
    for v in range(count):
        into = tuple((a, float(rng.integers(0, 9))) for a, b, _ in edges if b == v)
        out = tuple((b, float(rng.integers(0, 9))) for a, b, _ in edges if a == v)
        degrees = (1, 2) if rng.random() < 0.7 else (1,)
        choices = tuple(
            (
                degree,
                tuple(
                    Variant(name, *(float(x) for x in rng.integers(1, 20, 4)), into, out)
                    for name in ("a", "b")
                ),
            )
            for degree in degrees
        )
        nodes.append(VariantNode(v, str(v), choices))
    memory = float(rng.integers(20, 120))
    instance = VariantInstance(HERE, tuple(nodes), edges, 3, memory, 10.0, batch)
    pairs = [(r, t) for r in (1, 2, 3) for t in (1, 2) if r * t <= 3]
    found = [
        verify_variants(instance, stages)
        for cut in cuts(count, [(a, b) for a, b, _ in edges])
        for shape in itertools.product(pairs, repeat=len(cut))
        if sum(r * t for r, t in shape) <= 3
        for names in itertools.product(*(itertools.product("ab", repeat=len(n)) for n in cut))
        for stages in [
            [Stage(n, r, t, tuple(w)) for n, (r, t), w in zip(cut, shape, names, strict=True)]
        ]
    ]
    check(solve(instance, ENOUGH), best(found))


@pytest.mark.parametrize("seed", range(10))
def test_makespan(seed):
    """Up to five ops on two devices: over all placements and orders."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    compute = tuple(float(x) for x in rng.integers(1, 9, count))
    transfer = tuple(float(x) for x in rng.integers(0, 9, count))
    edges = edges_of(rng, count)
    instance = DataflowInstance(HERE, compute, transfer, ("",) * count, edges, 2)
    optimum = best(
        verify_makespan(instance, device, [[v for v in order if device[v] == d] for d in (0, 1)])
        for order in itertools.permutations(range(count))
        if all(order.index(a) < order.index(b) for a, b in edges)
        for device in itertools.product((0, 1), repeat=count)
    )
    row = solve(instance, Effort(Budget(evaluations=2000)))
    check(row, optimum)
    assert row.value <= 1.2 * optimum
