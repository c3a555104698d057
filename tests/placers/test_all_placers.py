"""Every placer on tiny and random problems; those that learn have theirs in `rl/`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import random_problem

from devplace.errors import InfeasibleError
from devplace.placers import ALL, PLAIN, Budget, Placer, Search, by_name, place
from devplace.simulator.bounds import lower_bound
from devplace.testing import TinyProblem, brute_force, check_placer, tiny_problems

PLACERS = [placer() for placer in PLAIN]
TINY = tiny_problems()
CONTAINED = ("single", "cpu", "even", "layers", "data-parallel", "greedy", "topo", "heft", "etf")


@pytest.mark.parametrize("placer", PLACERS, ids=lambda placer: placer.name)
def test_placers_keep_their_promises_on_tiny_problems(placer: Placer) -> None:
    """Complete, legal, reproducible and within budget on every hand-solved problem."""
    check_placer(placer)


@pytest.mark.parametrize("placer", PLACERS, ids=lambda placer: placer.name)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 25), devices=st.integers(1, 4))
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
    assert place(tiny.problem, Search(), Budget(evaluations=3000)).step_ns == tiny.step_ns, tiny.why


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 6), devices=st.integers(1, 3))
def test_s67_small_graphs_are_solved_exactly(seed: int, num_ops: int, devices: int) -> None:
    """At most 8 groups on 3 devices: as good as brute force in critical-path order, or better
    thanks to order; infeasible only if no order was found that fits."""
    problem = random_problem(seed, num_ops, devices)
    if devices**problem.core.tasks.num_groups > 1000:
        return
    try:
        best = brute_force(problem).step_ns
    except InfeasibleError:
        return
    assert place(problem, Search(), Budget(evaluations=1500)).step_ns <= best


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 40), devices=st.integers(1, 4))
def test_search_is_never_worse_than_another_placer(seed: int, num_ops: int, devices: int) -> None:
    """At the same evaluation budget the search fits where another placer fits, as fast or faster.

    These are the placers it starts from. Random placements and the published heuristics are not
    among them.
    """
    problem = random_problem(seed, num_ops, devices)
    budget, bound = Budget(evaluations=400), lower_bound(problem)
    found = place(problem, Search(), budget, seed, allow_infeasible=True, bound=bound)
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
