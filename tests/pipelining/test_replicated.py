"""Stages with replicas (PipeDream)."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplace.errors import ProblemError
from devplace.pipelining import ReplicatedProblem, evaluate_stages, solve_replicated
from devplace.pipelining.downsets import make_downsets


def random_stages(seed: int) -> ReplicatedProblem:
    """At most 6 nodes and 4 devices."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.5]
    return ReplicatedProblem(
        work_ps=rng.integers(0, 50, n),
        activation_bytes=rng.integers(0, 30, n),
        parameter_bytes=rng.integers(0, 30, n),
        edge_src=[a for a, _ in pairs],
        edge_dst=[b for _, b in pairs],
        num_devices=int(rng.integers(1, 5)),
        bandwidth=float(rng.integers(1, 10)) * 1e12,
        count_transfers=bool(rng.random() < 0.5),
        straight=bool(rng.random() < 0.3),
    )


def brute_force(problem: ReplicatedProblem) -> int:
    """All stages of all nodes, all replicas."""
    n, k, best = len(problem.work_ps), problem.num_devices, None
    for row in itertools.product(range(min(n, k)), repeat=n):
        stage = np.array(row, np.int32)
        used = int(stage.max()) + 1
        if len(set(row)) < used or (stage[problem.edge_src] > stage[problem.edge_dst]).any():
            continue
        most = 1 if problem.straight else k
        for replicas in itertools.product(range(1, most + 1), repeat=used):
            if sum(replicas) <= k:
                value = evaluate_stages(problem, stage, np.array(replicas, np.int32))
                best = value if best is None else min(best, value)
    assert best is not None
    return best


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_programme_equals_brute_force(seed):
    """The programme finds the best stages and replicas, and its stages have its value."""
    problem = random_stages(seed)
    solution = solve_replicated(problem)
    assert solution.status == "optimal"
    assert solution.value_ps == brute_force(problem)
    assert evaluate_stages(problem, solution.stage, solution.replicas) == solution.value_ps


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(1e-9, 1e-3))
def test_without_time_stages_are_worth_what_is_said(seed, seconds):
    """Where replicas are counted in groups of devices, the value is that of the stages, and never
    above that of one device, which groups leave out."""
    problem = random_stages(seed)
    solution = solve_replicated(problem, seconds=seconds)
    assert evaluate_stages(problem, solution.stage, solution.replicas) == solution.value_ps
    assert solution.bound_ps <= brute_force(problem) <= solution.value_ps
    assert solution.value_ps <= int(problem.work_ps.sum())


def test_groups_of_devices_that_are_too_slow_are_not_used():
    """Two replicas would take 110 s at 2 bytes/s, and 7000 years at 1e-9 bytes/s; one device takes
    8 ps."""
    for bandwidth in (2.0, 1e-9):
        problem = ReplicatedProblem([4, 4], [0, 0], [90, 130], [0], [1], 2, bandwidth)
        solution = solve_replicated(problem, seconds=1e-9)
        assert (solution.value_ps, solution.status) == (8, "feasible")
        assert (solution.stage.tolist(), solution.replicas.tolist()) == ([0, 0], [1])


def test_replicas_share_work_and_pay_for_weights():
    """Work 60 and 60 bytes at 1 byte/ps on 3 replicas: (60 + 4 * 2 * 60 / 3) / 3, rounded up."""
    problem = ReplicatedProblem([60], [0], [60], [], [], 3, 1e12)
    assert evaluate_stages(problem, np.array([0]), np.array([3])) == 74
    assert solve_replicated(problem).value_ps == 60


def test_orders_where_there_are_too_many_places_to_cut():
    """Above the limit the prefixes of one order are used: a valid answer without proof."""
    problem = ReplicatedProblem([3] * 12, [0] * 12, [0] * 12, [], [], 3, 1e12, straight=True)
    solution = solve_replicated(problem, max_downsets=100)
    assert (solution.value_ps, solution.bound_ps, solution.status) == (12, 12, "optimal")
    cut = ReplicatedProblem([5, 3, 3], [0] * 3, [0] * 3, [], [], 2, 1e12, straight=True)
    assert solve_replicated(cut, max_downsets=2).status in ("optimal", "feasible")


def test_malformed_stages_are_refused():
    """Negative work, unknown nodes, cycles and too many replicas are named."""
    with pytest.raises(ProblemError, match="work_ps must have one value"):
        ReplicatedProblem([-1], [0], [0], [], [], 1, 1.0)
    with pytest.raises(ProblemError, match="edge_dst must name nodes 0 to 0"):
        ReplicatedProblem([1], [0], [0], [0], [1], 1, 1.0)
    with pytest.raises(ProblemError, match="got 0 devices"):
        ReplicatedProblem([1], [0], [0], [], [], 0, 1.0)
    with pytest.raises(ProblemError, match="without cycles"):
        solve_replicated(ReplicatedProblem([1, 1], [0, 0], [0, 0], [0, 1], [1, 0], 1, 1.0))
    problem = ReplicatedProblem([1, 1], [0, 0], [0, 0], [0], [1], 1, 1.0)
    with pytest.raises(ProblemError, match="The stages use 2 devices, there are 1"):
        evaluate_stages(problem, np.array([0, 1]), np.array([1, 1]))
    with pytest.raises(ProblemError, match="goes back"):
        evaluate_stages(problem, np.array([1, 0]), np.array([1, 0]))


@pytest.mark.parametrize("count", [40, 400])
def test_wide_graphs_have_few_places_to_cut(count):
    """Of nodes without edges there are 2^N down-sets: as many prefixes of an order are taken as
    are asked for, the empty and the full one among them."""
    sets = make_downsets(count, np.zeros(0, np.int32), np.zeros(0, np.int32), 30)
    assert (len(sets.members), sets.complete) == (30, False)
    assert not sets.members[0].any()
    assert sets.members[-1].all()
    assert (np.diff(sets.members.astype(int), axis=0) >= 0).all()
