"""A new objective is one class, given to `place` as it is."""

from __future__ import annotations

import numpy as np
import pytest

from devplace import report
from devplace.errors import InputError
from devplace.placers import OBJECTIVES, Budget, Even, Heft, Objective, Search, Single, place
from devplace.plan import load_plan
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.bounds import LowerBound
from devplace.testing import hand_machine, hand_problem, tiny_problems
from devplace.verify import verify_plan


class DeviceTime(Objective):
    """What a step costs where devices are paid for by the time that they are taken: its length,
    for each device in use."""

    name, label = "device-time", "device time"

    def value(self, timeline: Timeline) -> int:
        used = np.unique(timeline.task_devices)
        return timeline.makespan_ns * len(used)

    def bound(self, problem: Problem, known: LowerBound) -> int:
        return known.step_ns


DIAMOND = """
a = f bytes=10 ns=20
b = f(a) bytes=10 ns=30
c = f(a) bytes=10 ns=30
d = f(b, c) bytes=10 ns=20 result=output
"""


def diamond() -> Problem:
    """Two equal devices: 100 ns on one; on both 20 + 10 (sent) + 30 + 20 = 80 ns."""
    return hand_problem(DIAMOND, hand_machine({"gpu:0": 1000, "gpu:1": 1000}))


def test_the_placement_with_the_least_value_is_taken() -> None:
    """On two devices the step takes 80 ns, on one 100: the first costs 160, so the second is taken.
    Its value, the bound, and what follows from them are those of the objective."""
    fast = place(diamond(), Search(least_gain=0), Budget(evaluations=300))
    assert (fast.value_ns, fast.step_ns, len(set(fast.placement.devices.tolist()))) == (80, 80, 2)
    found = place(diamond(), Search(least_gain=0), Budget(evaluations=300), objective=DeviceTime())
    assert (found.value_ns, found.step_ns) == (100, 100)
    assert found.bound_ns == found.bound.step_ns == 80
    assert found.gap == pytest.approx(100 / 80 - 1)
    assert found.status == "feasible"
    assert len(set(found.placement.devices.tolist())) == 1


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_no_plan_is_worse_than_the_one_for_the_step_time(tiny) -> None:
    """Of every placer and tiny problem the plan is legal, and its value is between the bound and
    that of the plan which the placer makes otherwise."""
    goal = DeviceTime()
    for placer in (Single(), Even(), Heft(), Search()):
        if placer.supports(tiny.problem):
            continue
        budget = Budget(evaluations=60)
        usual = place(tiny.problem, placer, budget, allow_infeasible=True)
        found = place(tiny.problem, placer, budget, objective=goal, allow_infeasible=True)
        assert found.is_feasible >= usual.is_feasible
        if not usual.is_feasible:
            continue
        assert not verify_plan(tiny.problem, found.plan).broken
        assert found.bound_ns <= found.value_ns <= goal.value(usual.timeline)
        assert found.value_ns == goal.value(simulate(tiny.problem, found.placement))


def test_reports_and_plans_say_what_was_to_be_small(tmp_path) -> None:
    """Its label heads a column, its name is in the plan's request and in the rows."""
    found = place(diamond(), Single(), Budget(evaluations=9), objective=DeviceTime())
    assert report.comparison_json([found])["rows"][0]["value_ns"] == 100
    assert report.comparison_json([found])["rows"][0]["objective"] == "device-time"
    table = report.comparison_table([found])
    assert "device time" in [column.header for column in table.columns]
    assert "device time" in report.plan_summary(found)
    found.plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.request["objective"] == "device-time"
    assert loaded.predicted.max_load_ns == 0


@pytest.mark.parametrize(
    "objective", [*OBJECTIVES, DeviceTime()], ids=lambda goal: getattr(goal, "name", goal)
)
def test_only_the_time_of_a_step_can_be_measured(objective) -> None:
    """Of all others a measurement is refused, with what it stands for."""
    problem = diamond()

    def measure(placement: Placement) -> int:
        return simulate(problem, placement).makespan_ns

    goal = OBJECTIVES.get(objective, objective)
    if goal.refuses(problem, is_measured=True):
        with pytest.raises(InputError, match=f"cannot stand for the {goal.label}"):
            place(problem, Single(), "9ev", objective=objective, measure=measure)
    else:
        assert goal.name == "latency"
        place(problem, Single(), "9ev", objective=objective, measure=measure)
    assert not goal.refuses(problem, is_measured=False)
