"""What finished schedules mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import random_problem

from devplace.placers import Budget, Etf, Evaluator, Heft, MEtf, MSct, Placer
from devplace.placers.list_schedulers.earliest import EarliestFirst
from devplace.placers.list_schedulers.list_schedule import ListSchedule, best_of, upward_rank
from devplace.problem import Problem
from devplace.schedule import waiting_ops
from devplace.simulator import simulate

SEEDS = st.integers(0, 2**32 - 1)
SCHEDULERS = [placer() for placer in (Heft, Etf, MEtf, MSct)]


def schedules(problem: Problem) -> list[ListSchedule]:
    """HEFT's and ETF's."""
    rank = upward_rank(problem, problem.accelerators).tolist()
    built = [Heft().build(problem, contention) for contention in (False, True)]
    return [*built, EarliestFirst(problem, rank).build()]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, num_ops=st.integers(1, 30), devices=st.integers(1, 4))
def test_the_best_order_is_taken(seed: int, num_ops: int, devices: int) -> None:
    """Never worse than by critical path, by start times or in the schedule's own order, the memory
    limits first; an own order can always finish; three evaluations per schedule."""
    problem = random_problem(seed, num_ops, devices)
    evaluate = Evaluator(problem, Budget(evaluations=1000))
    for schedule in schedules(problem):
        tried = [schedule.placement(), schedule.by_start(), schedule.in_order()]
        order = tried[2].order
        assert order is not None
        assert waiting_ops(problem.graph, order) is None
        before = evaluate.meter.num_evaluations
        found = evaluate(best_of([schedule], evaluate)).key
        assert evaluate.meter.num_evaluations == before + 4
        assert found == min(evaluate(placement).key for placement in tried)
        step = simulate(problem, tried[2]).makespan_ns
        assert evaluate(tried[2]).step_ns == step


@pytest.mark.parametrize("placer", SCHEDULERS, ids=lambda placer: placer.name)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num_ops=st.integers(1, 30), budget=st.integers(1, 8))
def test_no_budget_makes_it_worse(placer: Placer, seed: int, num_ops: int, budget: int) -> None:
    """With few evaluations the result is one of those simulated, the best of them, and no worse
    than with fewer."""
    if placer.supports(random_problem(seed, 1, 1)):
        pytest.skip("needs HiGHS")
    problem, keys = random_problem(seed, num_ops, 3), []
    for most in (1, budget):
        evaluate = Evaluator(problem, Budget(evaluations=most))
        found = placer(problem, evaluate, np.random.default_rng(0))
        assert evaluate.meter.num_evaluations <= most
        keys.append(Evaluator(problem, Budget(evaluations=1))(found).key)
    assert keys[1] <= keys[0]


def test_ops_without_time_stay_behind_what_they_read() -> None:
    """Ops that start together in the schedule keep an order in which they can run."""
    for seed in range(200):
        problem = random_problem(seed, 12, 2)
        for schedule in schedules(problem):
            order = schedule.in_order().order
            assert order is not None
            assert sorted(op for row in order for op in row) == sorted(
                problem.core.tasks.task_op[problem.core.tasks.is_source == 0].tolist()
            )
            assert waiting_ops(problem.graph, order) is None
