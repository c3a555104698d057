"""How large the model of a step gets."""

from __future__ import annotations

import numpy as np
import pytest
from tests.strategies import tiny_case

from devplace.errors import InfeasibleError, InputError
from devplace.pipelining.cp_sat import cp_model
from devplace.placers import Budget, Exact, place
from devplace.placers.exact import model, size
from devplace.placers.exact.model import Space, StepModel
from devplace.placers.exact.size import ModelSizeError, most_in_order, num_constraints
from devplace.problem import Problem
from devplace.simulator.memory_bounds import least_needs
from devplace.testing import brute_force_orders, hand_machine, hand_problem
from devplace.testing.layered import layered_problem

pytest.importorskip("ortools")


def space_of(problem: Problem) -> Space:
    """Every group on its own."""
    of_group = np.arange(problem.core.tasks.num_groups, dtype=np.int32)
    return Space(of_group, least_needs(problem).allowed, 10**9, 0, False)


def test_constraints_of_one_tensor_by_hand() -> None:
    """Between three devices there are six ways, each with five constraints of the transfer and one
    of its reader; a queue of one has no order."""
    machine = hand_machine({f"gpu:{k}": 99 for k in range(3)})
    problem = hand_problem("a = f bytes=1 ns=5\nb = f(a) bytes=1 ns=5 result=output", machine)
    space = space_of(problem)
    assert num_constraints(problem, space.of_group, space.allowed) == 6 * (5 + 1)


@pytest.mark.parametrize(
    "problem",
    [layered_problem(300, 4), layered_problem(60, 8), layered_problem(40, 24)],
    ids=["300x4", "60x8", "40x24"],
)
def test_the_number_of_constraints_is_known_before(problem: Problem) -> None:
    """It is foretold to within a half, and never too high."""
    space = space_of(problem)
    made = len(StepModel(cp_model(), problem, space).model.proto.constraints)
    assert made / 2 < num_constraints(problem, space.of_group, space.allowed) < made


def test_no_model_grows_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building ends where it has more constraints than allowed, not when it is whole."""
    problem = layered_problem(60, 8)
    monkeypatch.setattr(model, "MAX_CONSTRAINTS", 5000)
    built = []
    cp = cp_model()

    class Spy:
        CpModel = staticmethod(lambda: built.append(cp.CpModel()) or built[0])

    with pytest.raises(ModelSizeError, match="more than 5,000 constraints"):
        StepModel(Spy, problem, space_of(problem))
    assert len(built[0].proto.constraints) < 6000


def test_orders_of_queues_are_limited_one_by_one_and_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queues of 2, 3 and 4 have 1, 3 and 6 pairs."""
    sizes = [2, 2, 3, 4]
    for each, together, most in ((6, 11, 4), (5, 11, 3), (6, 10, 3), (6, 4, 2), (6, 1, 0)):
        monkeypatch.setattr(size, "MAX_PAIRS", each)
        monkeypatch.setattr(size, "MAX_PAIRS_IN_ALL", together)
        assert most_in_order(sizes) == most


def test_without_orders_of_queues_proofs_still_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that only keeps transfers apart allows more, so its bound is below every step."""
    monkeypatch.setattr(size, "MAX_PAIRS_IN_ALL", 0)
    compared = 0
    for seed in range(200):
        problem = tiny_case(seed, 6)
        if not 3 <= int((problem.core.tasks.is_source == 0).sum()) <= 5:
            continue
        try:
            truth = brute_force_orders(problem, 1000).step_ns
        except (InputError, InfeasibleError):
            continue
        found = place(problem, Exact(), Budget(evaluations=300), allow_infeasible=True)
        assert found.bound.step_ns <= truth, seed
        compared += 1
        if compared == 15:
            break
    assert compared == 15


def test_orders_of_many_devices_are_left_out() -> None:
    """40 transfers have 780 pairs: 43,680 on 56 lanes (8 devices), 430,560 on 552 (24)."""
    assert most_in_order([40] * 56) == 40
    assert most_in_order([40] * 552) == 0
