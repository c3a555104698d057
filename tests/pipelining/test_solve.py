"""Solving max-load problems: against brute force, and what a solution promises."""

import importlib.util
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipelining.test_load_problem import chain
from tests.pipelining.tiny import best_load, native, random_problem

from devplace.errors import InputError, ProblemError
from devplace.pipelining import LoadProblem, broken_rule, loads, solve, solve_contiguous
from devplace.pipelining.items import make_items
from devplace.pipelining.load_bounds import count_bound, item_bound, quick_bound, work_bound
from devplace.pipelining.native import solvers_module

SEEDS = st.integers(0, 2**32 - 1)
needs_exact = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None, reason="OR-Tools is not installed"
)


def check(problem: LoadProblem, solution) -> None:
    """What every solution promises."""
    if solution.device is None:
        assert solution.value_ps is None
        assert solution.status in ("infeasible", "unknown")
        return
    assert broken_rule(problem, solution.device) == ""
    assert solution.value_ps == loads(problem, solution.device).max(initial=0)
    assert solution.bound_ps <= solution.value_ps
    assert (solution.status == "optimal") == (solution.value_ps == solution.bound_ps)


@settings(max_examples=60)
@given(SEEDS)
def test_search_equals_brute_force(seed):
    """The search alone finds the optimum of tiny problems, and none where there is none."""
    problem = random_problem(seed)
    solution = solve(problem, seed=seed, threads=1, max_evaluations=30_000, exact=False)
    check(problem, solution)
    assert solution.value_ps == best_load(problem)


@settings(max_examples=15)
@given(SEEDS)
def test_plain_search_equals_brute_force(seed):
    """So does the plain Python search."""
    problem = random_problem(seed)
    with native(False):
        solution = solve(problem, seed=seed, threads=1, max_evaluations=8_000, exact=False)
    check(problem, solution)
    assert solution.value_ps == best_load(problem)


@needs_exact
@settings(max_examples=15)
@given(SEEDS)
@pytest.mark.slow
def test_exact_proves_what_brute_force_finds(seed):
    """With CP-SAT each tiny problem is proved optimal or infeasible."""
    problem = random_problem(seed)
    solution = solve(problem, seconds=20, threads=1)
    check(problem, solution)
    assert solution.value_ps == best_load(problem)
    assert solution.status == ("infeasible" if solution.value_ps is None else "optimal")


@settings(max_examples=60)
@given(SEEDS)
def test_bounds_are_below_the_optimum(seed):
    """No bound is above the smallest largest load of any placement."""
    problem = random_problem(seed)
    best, items = best_load(problem), make_items(problem)
    if best is None:
        return
    assert work_bound(items) <= best
    assert count_bound(items) <= best
    assert quick_bound(items) <= best
    plain = item_bound(items, None, 1.0)
    assert plain <= best
    if solvers_module() is not None:
        assert plain <= item_bound(items, solvers_module(), 1.0) <= best


def test_work_bound_cuts_the_item_on_the_boundary():
    """Work 60 on two accelerators and a CPU ten times as slow: 60 / (2 + 1 / 10), rounded up."""
    assert work_bound(make_items(chain())) == 29


def test_item_bound_counts_what_must_be_moved():
    """The node in the middle must pay for an edge on either side, or take the neighbours in."""
    problem = chain(cpu_ps=[1000, 1000, 1000], edge_ps=[5, 7, 5], num_cpus=0, memory_bytes=6)
    if solvers_module() is None:
        pytest.skip("needs the native module")
    assert item_bound(make_items(problem), solvers_module(), 1.0) == 30 + 5 + 7


@settings(max_examples=60)
@given(SEEDS)
def test_contiguous_split_equals_brute_force(seed):
    """The programme finds the best split whose devices can be put in pipeline order."""
    problem = random_problem(seed)
    if problem.num_devices > 3:
        return
    best = _best_contiguous(problem)
    solution = solve_contiguous(problem)
    if solution.device is not None:
        assert broken_rule(problem, solution.device) == ""
        assert loads(problem, solution.device).max() == solution.value_ps
        assert _is_contiguous(problem, solution.device)
    if solvers_module() is not None:
        assert solution.value_ps == best
        assert solution.status == ("infeasible" if best is None else "optimal")
    with native(False):
        plain = solve_contiguous(problem)
    if plain.value_ps is not None:
        assert best is not None
        assert plain.value_ps >= best


def _is_contiguous(problem: LoadProblem, device) -> bool:
    items = make_items(problem)
    of = items.gather(np.asarray(device))
    if any(len(set(of[items.block == b].tolist())) > 1 for b in items.block):
        return False
    used = sorted(set(of.tolist()))
    pairs = {
        (int(of[a]), int(of[b])) for a, b in zip(items.before_src, items.before_dst, strict=True)
    }
    return any(
        all(order.index(a) <= order.index(b) for a, b in pairs)
        for order in itertools.permutations(used)
    )


def _best_contiguous(problem: LoadProblem) -> int | None:
    from tests.pipelining.tiny import placements

    return min(
        (
            int(loads(problem, device).max())
            for device in placements(problem)
            if _is_contiguous(problem, device)
        ),
        default=None,
    )


def larger(seed: int = 0, nodes: int = 120, **changes) -> LoadProblem:
    """A random layered graph with pairs of nodes in classes."""
    rng = np.random.default_rng(seed)
    src = np.concatenate([np.arange(nodes - 1), rng.integers(0, nodes - 9, nodes)])
    dst = np.concatenate([np.arange(1, nodes), np.zeros(nodes, np.int64)])
    dst[nodes - 1 :] = src[nodes - 1 :] + rng.integers(2, 9, nodes)
    cost = rng.integers(0, 40, nodes)
    fields = dict(
        accelerator_ps=rng.integers(1, 100, nodes),
        cpu_ps=rng.integers(500, 1000, nodes),
        can_accelerate=np.ones(nodes, bool),
        size_bytes=rng.integers(1, 50, nodes),
        edge_src=src,
        edge_dst=dst,
        edge_ps=cost[src],
        color=np.where(np.arange(nodes) % 5 == 0, np.arange(nodes) // 10, -1),
        is_backward=np.zeros(nodes, bool),
        num_accelerators=4,
        num_cpus=1,
        memory_bytes=1000,
    )
    return LoadProblem(**{**fields, **changes})


@pytest.mark.parametrize("with_native", [True, False])
def test_same_seed_same_answer(with_native):
    """One thread with a count of moves gives the same placement every time."""
    problem, moves = larger(), 300_000 if with_native else 3_000
    with native(with_native):
        first, second = (
            solve(problem, seed=3, threads=1, max_evaluations=moves, exact=False) for _ in range(2)
        )
    check(problem, first)
    assert first.device.tolist() == second.device.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_search_is_not_above_its_starts(seed):
    """The answer is at most the contiguous split and a given hint, within tight memory."""
    problem = larger(seed, num_cpus=0, memory_bytes=int(larger(seed).size_bytes.sum() / 4 * 1.02))
    split = solve_contiguous(problem)
    solution = solve(problem, seed=seed, threads=1, max_evaluations=400_000, exact=False)
    check(problem, solution)
    assert solution.status == "feasible"
    if split.value_ps is not None:
        assert solution.value_ps <= split.value_ps
    again = solve(
        problem, threads=1, max_evaluations=1, hint=solution.device, exact=False, seed=seed + 1
    )
    assert again.value_ps <= solution.value_ps


def test_a_hint_above_memory_is_repaired():
    """A hint that puts all on one accelerator is a start, not an answer."""
    problem = larger()
    hint = np.zeros(problem.num_nodes, np.int32)
    solution = solve(problem, threads=1, max_evaluations=50_000, hint=hint, exact=False)
    check(problem, solution)
    assert solution.device is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_cpus": 0, "memory_bytes": 2}, "all nodes hold 6 B and 2 accelerators have 4 B"),
        (
            {"num_cpus": 0, "num_accelerators": 3, "memory_bytes": 2},
            "node 2 and its class hold 3 B",
        ),
        ({"num_cpus": 0, "can_accelerate": [True, False, True]}, "node 1 or one of its class"),
        (
            {"num_cpus": 0, "color": [7, -1, 7], "memory_bytes": 3},
            "node 0 and its class hold 4 B, an accelerator has 3 B",
        ),
    ],
)
def test_infeasible_problems_are_said_to_be_so(changes, reason):
    """What cannot fit is told with the sums that show it."""
    solution = solve(chain(**changes), seconds=1)
    assert solution.status == "infeasible"
    assert solution.device is None
    assert reason in solution.how


@needs_exact
def test_sizes_that_cannot_be_packed_are_proved_infeasible():
    """Three nodes of 2 on two accelerators of 3 fit in total but not one by one."""
    problem = chain(num_cpus=0, size_bytes=[2, 2, 2], memory_bytes=3)
    solution = solve(problem, seconds=60, threads=1)
    assert solution.status == "infeasible"
    assert "packed" in solution.how
    assert solve(problem, seconds=0.2, threads=1, exact=False).status == "unknown"


def test_nothing_to_place_is_optimal():
    """A problem without nodes has load 0."""
    times = {"accelerator_ps": [], "cpu_ps": [], "size_bytes": [], "can_accelerate": []}
    edges = {"edge_src": [], "edge_dst": [], "edge_ps": []}
    problem = chain(**times, **edges, color=[], is_backward=[])
    solution = solve(problem, seconds=1)
    assert (solution.status, solution.value_ps) == ("optimal", 0)


def test_wrong_arguments_are_refused():
    """Seconds must be positive, a hint must fit."""
    with pytest.raises(InputError, match="seconds must be positive, got 0"):
        solve(chain(), seconds=0)
    with pytest.raises(ProblemError, match="must use devices 0 to 2"):
        solve(chain(), hint=[0, 1, 9])


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("most", [0, 1, 2, 10, 700])
def test_no_more_moves_are_tried_than_allowed(most, is_native):
    """In all, not by each thread; with and without a limit of time beside it."""
    for seed in range(20):
        problem = random_problem(seed)
        for seconds in (None, 20.0):
            with native(is_native):
                found = solve(problem, seconds, seed, threads=3, max_evaluations=most, exact=False)
            check(problem, found)
            assert found.evaluations <= most
