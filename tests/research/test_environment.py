"""What placements of groups cost, and that it is counted."""

from __future__ import annotations

import numpy as np
import pytest

from devplace.errors import InputError
from devplace.placers import Budget, Evaluator, Random, place
from devplace.placers.local_search.search import Search
from devplace.problem import Placement
from devplace.research.environment import Environment
from devplace.research.grouping import Grouping
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_problem
from tests.research.cases import all_actions, environment, three_ops


def test_scores_are_those_of_the_simulator() -> None:
    """All 8 placements of three ops have the step that `simulate` gives; the optimum is 28."""
    env, every = environment(three_ops()), all_actions(3, 2)
    outcome = env(every)
    steps = [simulate(env.problem, env.placement(row)).makespan_ns for row in every]
    assert outcome.step_ns.tolist() == steps
    assert min(steps) == 28
    assert steps.count(28) == 1
    assert env.best_key == (0, 28)
    assert env.best_actions.tolist() == every[steps.index(28)].tolist() == [0, 1, 0]
    assert env.evaluate.meter.num_evaluations == 8


def test_failures_are_told_by_their_bytes() -> None:
    """What is over a limit failed; the best is the nearest to fitting where nothing fits."""
    env = environment(three_ops(memory=2))
    outcome = env(all_actions(3, 2))
    assert outcome.failed.any()
    assert (outcome.failed == (outcome.overflow_bytes > 0)).all()
    none = environment(three_ops(memory=1))
    found = none(all_actions(3, 2))
    assert found.failed.all()
    assert none.best_key is not None
    assert none.best_key[0] == found.overflow_bytes.min()
    assert none.evaluate.history.best is None
    assert simulate(none.problem, none.best()).makespan_ns == none.best_key[1]


def test_the_budget_is_never_exceeded() -> None:
    """`room` says how many are left, and more are refused."""
    env = environment(three_ops(), evaluations=5)
    assert env.room(3) == 3
    env(np.zeros((3, 3), int))
    assert env.room(3) == 2
    with pytest.raises(ValueError, match="ask room"):
        env(np.zeros((3, 3), int))
    env(np.zeros((2, 3), int))
    assert env.room(3) == 0
    with pytest.raises(ValueError, match=r"\[B, 3\]"):
        env(np.zeros((2, 4), int))


def test_actions_are_usable_devices_and_pins_hold() -> None:
    """Excluded devices are no actions; a member that may not go there goes where it may."""
    problem = hand_problem(
        """
        a = f ns=5 bytes=1 module=head
        b = f(a) ns=5 bytes=1
        """,
        hand_machine({"gpu:0": 9, "gpu:1": 9, "gpu:2": 9}),
        pins={"head": "gpu:2"},
        exclude=["gpu:0"],
    )
    env = Environment(
        Evaluator(problem, Budget(evaluations=9)), Grouping(problem, np.zeros(2, np.int32))
    )
    assert env.devices.tolist() == [1, 2]
    assert env.allowed.tolist() == [[False, True]]
    assert env.task_devices(np.array([[0], [1]])).tolist() == [[2, 1], [2, 2]]
    assert problem.violations(env.placement(np.array([0]))) == []


def test_measured_steps_take_the_place_of_simulated_ones() -> None:
    """A callable scores what is within the limits; None is a failure; the best is by its times."""
    problem = three_ops()
    seen: list[list[int]] = []

    def measure(placement: Placement) -> int | None:
        seen.append(problem.task_devices(placement).tolist())
        return None if seen[-1] == [0, 1, 0] else 1000 + len(seen)

    evaluate = Evaluator(problem, Budget(evaluations=99), measure=measure)
    step, overflow = evaluate.batch(all_actions(3, 2).astype(np.int32))
    assert seen == all_actions(3, 2).tolist()
    assert overflow.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert [s for s, o in zip(step, overflow, strict=True) if not o] == [
        1000 + k for k in (1, 2, 4, 5, 6, 7, 8)
    ]
    assert evaluate.history.best is not None
    assert problem.task_devices(evaluate.history.best).tolist() == [0, 0, 0]
    assert evaluate.meter.num_evaluations == 8


def test_what_is_over_a_limit_is_not_run() -> None:
    """A placement that the simulation finds too large is not measured."""
    problem = three_ops(memory=1)

    def measure(placement: Placement) -> int | None:
        raise AssertionError("it was run")

    evaluate = Evaluator(problem, Budget(evaluations=9), measure=measure)
    assert (evaluate.batch(np.zeros((1, 3), np.int32))[1] > 0).all()


def test_place_learns_from_measured_steps() -> None:
    """`place(measure=...)` takes what was measured fastest; the annealing search refuses."""
    problem = three_ops()

    def measure(placement: Placement) -> int | None:
        return 5 if problem.task_devices(placement).tolist() == [1, 1, 1] else 9

    found = place(problem, Random(), "64ev", 0, measure=measure)
    assert found.history[-1][2] == 5
    with pytest.raises(InputError, match="measured step times"):
        place(problem, Search(), "64ev", 0, measure=measure)


def test_an_evaluator_goes_on_where_another_stopped() -> None:
    """Its state holds counts, history, the best, and runners-up."""
    first = Evaluator(three_ops(), Budget(evaluations=20))
    first.batch(all_actions(3, 2).astype(np.int32))
    second = Evaluator(three_ops(), Budget(evaluations=20))
    spent = first.meter.seconds
    second.load_state_dict(first.state_dict())
    assert second.meter.num_evaluations == 8
    assert second.history.points == first.history.points
    assert second.history.best is not None
    assert first.history.best is not None
    assert second.history.best.devices.tolist() == first.history.best.devices.tolist()
    assert len(second.history.next_best(9)) == len(first.history.next_best(9))
    assert second.meter.seconds >= spent
