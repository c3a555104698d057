"""Theme U: a planner in daily use."""

from __future__ import annotations

import dataclasses

import pytest
from tests.strategies import random_problem
from tests.user_threads.helpers import chain
from tests.user_threads.machines import equal

from devplace.errors import ProblemError
from devplace.placers import Budget, Heft, Random, Search, place
from devplace.testing import hand_machine, hand_problem


def test_s62_a_changed_plan_is_priced_and_nothing_else_changes() -> None:
    """A plan with one op moved by hand is simulated as it is: other ops stay where they were."""
    problem = hand_problem(chain([10] * 3) + "\nz = f(x) bytes=1 ns=40", equal(2, 1000))
    plan = place(problem, Heft(), "9ev").plan
    op = problem.graph.op_index["z"]
    target = 1 - plan.placement[op]
    placement = tuple(target if k == op else d for k, d in enumerate(plan.placement))
    order = [[k for k in row if k != op] for row in plan.order]
    order[target].append(op)
    moved = dataclasses.replace(plan, placement=placement, order=tuple(map(tuple, order)))
    moved.check(problem)
    timeline = moved.timeline(problem)
    assert timeline.order == moved.order
    assert timeline.devices[op] == target
    same = [k for k in range(len(placement)) if k not in (op, problem.graph.op_index["x"])]
    assert timeline.devices[same].tolist() == [plan.placement[k] for k in same]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("evaluations", [1, 50, 300])
def test_s62_a_warm_start_is_never_worse_than_its_start(seed: int, evaluations: int) -> None:
    """Search from a given plan, its order included, gives that plan or a better one, even with
    a budget of one evaluation."""
    problem = random_problem(seed, 30, 3)
    start = place(problem, Search(), Budget(evaluations=400), seed=1, allow_infeasible=True)
    warm = Search(start=start.plan.as_placement())
    again = place(problem, warm, Budget(evaluations=evaluations), allow_infeasible=True)
    found = [(sum(r.timeline.missing_bytes.values()), r.step_ns) for r in (again, start)]
    assert found[0] <= found[1]


def test_s62_a_start_that_breaks_a_demand_is_refused() -> None:
    """A start against a pin is named, not silently changed."""
    machine = hand_machine({"gpu:0": 99, "gpu:1": 99})
    free = hand_problem("a = f ns=5", machine)
    start = place(free, Random(), "8ev", seed=0).placement
    away = free.machine.device_names[1 - int(start.devices[0])]
    pinned = hand_problem("a = f ns=5", machine, pins={"a": away})
    with pytest.raises(ProblemError, match="the start breaks a demand: 'a' may not go to"):
        place(pinned, Search(start=start))


def test_s67_optimal_under_the_model_can_be_told() -> None:
    """When the step equals the lower bound, the gap says that no plan is faster."""
    problem = hand_problem("a = f ns=5\nb = f ns=5", hand_machine({"gpu:0": 9, "gpu:1": 9}))
    result = place(problem, Search(), "200ev")
    assert (result.step_ns, result.gap) == (5, 0.0)
