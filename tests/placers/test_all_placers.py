"""Every placer on tiny and random problems; those that learn have theirs in `rl/`."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.strategies import random_problem, tiny_case

from devplace.errors import InfeasibleError
from devplace.placers import (
    ALL,
    OBJECTIVES,
    PLAIN,
    Budget,
    Contiguous,
    Placer,
    Search,
    by_name,
    place,
)
from devplace.simulator.bounds import lower_bound
from devplace.testing import (
    TinyProblem,
    brute_force,
    brute_force_orders,
    check_placer,
    tiny_problems,
)

PLACERS = [placer() for placer in PLAIN]
TINY = tiny_problems()
CONTAINED = {
    *("single", "cpu", "even", "layers", "data-parallel", "greedy", "topo", "pipedream", "expert"),
    *("heft", "etf", "m-topo", "m-etf", "mayer"),
}
BEST = Search(least_gain=0.0)


@pytest.mark.parametrize("placer", PLACERS, ids=lambda placer: placer.name)
def test_placers_keep_their_promises_on_tiny_problems(placer: Placer) -> None:
    """Complete, legal, reproducible and within budget on every hand-solved problem."""
    check_placer(placer)


@pytest.mark.parametrize("placer", PLACERS, ids=lambda placer: placer.name)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 25), devices=st.integers(1, 4))
@example(seed=2, num_ops=2, devices=2)  # the other device holds less in the same time
def test_placers_keep_their_promises_on_random_problems(
    placer: Placer, seed: int, num_ops: int, devices: int
) -> None:
    """The same on random graphs and machines, degenerate ones included."""
    check_placer(placer, [random_problem(seed, num_ops, devices)], evaluations=30)


@pytest.mark.parametrize("evaluations", [1, 2, 7])
@pytest.mark.parametrize("placer", PLACERS, ids=lambda placer: placer.name)
def test_a_tiny_budget_still_gives_a_placement(placer: Placer, evaluations: int) -> None:
    """One evaluation is enough to return something legal."""
    check_placer(placer, evaluations=evaluations)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("placer", [*PLACERS, Contiguous()], ids=lambda placer: placer.name)
def test_no_placer_spends_more_than_its_budget(placer: Placer, objective: str) -> None:
    """What is counted is never above the evaluations allowed, for both objectives."""
    for problem in (*(tiny.problem for tiny in TINY), random_problem(1, 25, 3)):
        if placer.supports(problem):
            continue
        for evaluations in (1, 2, 3, 10):
            budget = Budget(evaluations=evaluations)
            found = place(problem, placer, budget, objective=objective, allow_infeasible=True)
            assert found.evaluations <= evaluations


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("placer", PLACERS, ids=lambda placer: placer.name)
def test_no_placer_beats_the_optimum(placer: Placer, tiny: TinyProblem) -> None:
    """What fits is never faster than the hand-solved optimum (order gains nothing in these)."""
    if placer.supports(tiny.problem):
        return
    result = place(tiny.problem, placer, Budget(evaluations=500), allow_infeasible=True)
    if result.is_feasible:
        assert result.step_ns >= tiny.step_ns


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_search_finds_the_optimum_of_tiny_problems(tiny: TinyProblem) -> None:
    """The search solves every hand-solved problem."""
    assert place(tiny.problem, BEST, Budget(evaluations=3000)).step_ns == tiny.step_ns, tiny.why


@pytest.mark.parametrize("block", range(5))
@pytest.mark.slow
def test_search_equals_brute_force_on_500_tiny_cases(block: int) -> None:
    """Up to 10 ops and 3 unequal devices, with memory limits, pins, groups: as fast as the best of
    all placements in critical-path order (or faster, thanks to order), never below the bound."""
    for seed in range(100 * block, 100 * block + 100):
        problem = tiny_case(seed)
        count = math.prod(problem.allowed.sum(axis=1).tolist())
        budget = Budget(evaluations=2 * count + 150)
        found = place(problem, BEST, budget, allow_infeasible=True)
        try:
            best = brute_force(problem, 60_000).step_ns
        except InfeasibleError:
            continue
        assert found.is_feasible, seed
        assert found.bound.step_ns <= found.step_ns <= best, seed


def test_search_finds_the_best_order_of_tiny_problems() -> None:
    """Up to 4 ops in order: the best of all placements under all priorities, memory limits
    included; no placement is left out because it does not fit in critical-path order."""
    compared = 0
    for seed in range(200):
        problem = tiny_case(seed, 6)
        if not 2 <= int((problem.core.tasks.is_source == 0).sum()) <= 4:
            continue
        found = place(problem, BEST, Budget(evaluations=8000), allow_infeasible=True)
        compared += 1
        try:
            best = brute_force_orders(problem, waits=False).step_ns
        except InfeasibleError:
            assert not found.is_feasible or found.placement.order is not None, seed
            continue
        assert found.is_feasible, seed
        is_held_back = found.placement.order is not None  # may be better than any priorities
        assert found.step_ns <= best if is_held_back else found.step_ns == best, seed
        if compared == 30:
            break
    assert compared == 30


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 40), devices=st.integers(1, 4))
def test_search_is_never_worse_than_another_placer(seed: int, num_ops: int, devices: int) -> None:
    """At the same evaluation budget the search fits where another placer fits, as fast or faster.

    These are the placers it starts from. Random placements and the published heuristics are not
    among them.
    """
    problem = random_problem(seed, num_ops, devices)
    budget, bound = Budget(evaluations=400), lower_bound(problem)
    found = place(problem, BEST, budget, seed, allow_infeasible=True, bound=bound)
    key = (sum(found.timeline.missing_bytes.values()), found.step_ns)
    for placer in PLACERS:
        if placer.name not in CONTAINED or placer.supports(problem):
            continue
        other = place(problem, placer, budget, seed, allow_infeasible=True, bound=bound)
        assert key <= (sum(other.timeline.missing_bytes.values()), other.step_ns), placer.name


def test_placers_have_their_own_names() -> None:
    """Names are unique and lead back to the placer; a misspelt one is told the near one."""
    names = [placer().name for placer in ALL]
    assert len(set(names)) == len(names)
    assert [type(by_name(name)) for name in names] == list(ALL)
    with pytest.raises(Exception, match="Did you mean 'search'"):
        by_name("serach")
