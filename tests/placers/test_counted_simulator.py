"""The counted simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement

from devplace.placers import Budget, Evaluator
from devplace.placers.simple.single import all_on
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_placement, hand_problem

LARGEST = np.iinfo(np.int64).max


def test_rows_over_the_budget_are_not_simulated() -> None:
    """A batch is cut at the budget; what was cut has the worst score."""
    problem = hand_problem("a = f ns=5", hand_machine({"gpu:0": 9, "gpu:1": 9}))
    evaluate = Evaluator(problem, Budget(evaluations=3))
    step, overflow = evaluate.batch(np.zeros((2, 1), np.int32))
    assert (step.tolist(), overflow.tolist()) == ([5, 5], [0, 0])
    step, overflow = evaluate.batch(np.zeros((2, 1), np.int32))
    assert (step.tolist(), overflow.tolist()) == ([5, LARGEST], [0, LARGEST])
    assert evaluate.exhausted
    assert evaluate.meter.num_evaluations == 3
    assert evaluate.meter.fraction_spent == 1.0
    assert evaluate(all_on(problem, 0)).key == (LARGEST, LARGEST)


def test_history_has_every_improvement_that_fits() -> None:
    """Only feasible placements better than all before are noted, with the count at that time."""
    problem = hand_problem("a = f bytes=5 ns=9,7,5", hand_machine({"x": 9, "y": 9, "z": 4}))
    evaluate = Evaluator(problem, Budget(evaluations=10))
    for device in (0, 2, 1, 0):
        evaluate(all_on(problem, device))
    assert [(count, step) for count, _, step in evaluate.history.points] == [(1, 9), (3, 7)]


@settings(max_examples=80, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_scores_are_those_of_the_simulator(problem: Problem, seed: int) -> None:
    """Step time and overflow agree with a full simulation, also when memory is not tracked."""
    placement = random_placement(problem, np.random.default_rng(seed))
    score = Evaluator(problem, Budget(evaluations=1))(placement)
    timeline = simulate(problem, placement)
    assert score.step_ns == timeline.makespan_ns
    assert score.overflow_bytes == sum(timeline.missing_bytes.values())


def test_copies_in_one_pool_are_all_counted() -> None:
    """Memory is tracked where two devices of one pool may each hold a copy of an input."""
    problem = hand_problem(
        "x = input bytes=60\na = f(x) bytes=0 ns=1\nb = f(x) bytes=0 ns=1",
        hand_machine({"gpu:0": 100, "gpu:1": 100}, pools={"ram": (100, ("gpu:0", "gpu:1"))}),
    )
    evaluate = Evaluator(problem, Budget(evaluations=1))
    assert evaluate(hand_placement(problem, {"b": "gpu:1"})).overflow_bytes == 20


@pytest.mark.parametrize("in_order", [False, True])
def test_overflow_is_that_of_devices_and_pools(in_order: bool) -> None:
    """Two tensors of 50 bytes on a device of 80 break its limit by 20, and that of a pool of 70 by
    30; a placement with an order is judged as one without."""
    problem = hand_problem(
        "a = f bytes=50 ns=1\nb = f(a) bytes=50 ns=1",
        hand_machine({"gpu:0": 80, "gpu:1": 80}, pools={"ram": (70, ("gpu:0", "gpu:1"))}),
    )
    order = ((0, 1), ()) if in_order else None
    score = Evaluator(problem, Budget(evaluations=1))(Placement(np.zeros(2, np.int32), order=order))
    assert score.overflow_bytes == 20 + 30


def test_memory_is_not_tracked_where_everything_fits_anyway() -> None:
    """With room for all tensors on every device the check is skipped."""
    text = "a = f bytes=40 ns=1\nb = f(a) bytes=40 ns=1"
    small = hand_problem(text, hand_machine({"gpu:0": 100, "gpu:1": 500}))
    large = hand_problem(text, hand_machine({"gpu:0": 500, "gpu:1": 500}))
    found = [Evaluator(p, Budget(evaluations=1)).memory_cannot_bind for p in (small, large)]
    assert found == [False, True]


def test_an_order_is_measured_as_priorities_are() -> None:
    """A placement with an order is run by the measurement too; one that fails there does not fit,
    and one that breaks a limit is not run."""
    problem = hand_problem(
        "a = f bytes=5 ns=9\nb = f bytes=5 ns=9", hand_machine({"gpu:0": 10, "gpu:1": 4})
    )
    ran: list[Placement] = []

    def measure(placement: Placement) -> int | None:
        ran.append(placement)
        return 70 if placement.order == ((0, 1), ()) else None

    evaluate = Evaluator(problem, Budget(evaluations=9), measure=measure)
    devices = np.zeros(2, np.int32)
    good = Placement(devices, order=((0, 1), ()))
    assert evaluate(good).key == (0, 70)
    assert evaluate(Placement(devices, order=((1, 0), ()))).key == (1, 18)
    assert evaluate(Placement(devices + 1, order=((), (0, 1)))).overflow_bytes == 1  # 5 at once
    assert len(ran) == 2
    assert evaluate.history.best == good
    again = Evaluator(problem, Budget(evaluations=9))
    again.load_state_dict(evaluate.state_dict())
    assert again.history.best == good
