"""Orders as turns of tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement, random_problem

from devplace.placers.turns import placed_in_turn, turns_by, turns_of
from devplace.problem import Problem
from devplace.simulator import make_kernel, simulate
from devplace.simulator.kernel import ReferenceKernel

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(problem=problems, seed=SEEDS)
@example(problem=random_problem(seed=4, num_ops=33, num_devices=4), seed=2771428)  # two streams
def test_turns_by_any_key_can_be_kept_on_any_devices(problem: Problem, seed: int) -> None:
    """Every op comes after what it reads, so devices that wait for their turns finish; a batch of
    placements takes as long as each in its order."""
    rng = np.random.default_rng(seed)
    turn = turns_by(problem, rng.integers(0, 5, problem.core.tasks.num_tasks))
    device = problem.task_devices(random_placement(problem, rng))
    timeline = simulate(problem, placed_in_turn(problem, device, turn))
    tasks = problem.core.tasks
    assert sum(map(len, timeline.order)) == int((tasks.is_source == 0).sum())
    for kernel in (make_kernel(problem.core), ReferenceKernel(problem.core)):
        scores = kernel.evaluate(device[None, :], turn, in_turn=True)
        assert scores.makespan_ns[0] == timeline.makespan_ns
        np.testing.assert_array_equal(scores.peak_bytes[0], timeline.run.peak_bytes)


@settings(max_examples=60, deadline=None)
@given(problem=problems, seed=SEEDS)
def test_turns_of_an_order_are_that_order(problem: Problem, seed: int) -> None:
    """Whatever orders a simulated step had, its turns give them back."""
    placement = random_placement(problem, np.random.default_rng(seed))
    timeline = simulate(problem, placement)
    held = replace(placement, order=timeline.order)
    again = placed_in_turn(problem, timeline.task_devices, turns_of(problem, held))
    assert again.order == timeline.order
