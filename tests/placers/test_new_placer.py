"""A new placer is one file and one line in `PLAIN`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from devplace import placers
from devplace.errors import InputError
from devplace.placers import Evaluator, Objective, by_name, place
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline
from devplace.simulator.bounds import LowerBound
from devplace.testing import check_placer, tiny_problems


@dataclass(frozen=True)
class Alternate:
    """Group after group to the devices in turn, from each of them; the best of these."""

    name: str = "alternate"

    def supports(self, problem: Problem) -> str:
        return "" if len(problem.usable_devices) > 1 else "it needs two devices"

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        groups = np.arange(problem.core.tasks.num_groups)
        usable = np.array(problem.usable_devices)
        found = []
        for first in range(len(usable)):
            if found and evaluate.exhausted:
                break
            wish = usable[(groups + first) % len(usable)]
            allowed = problem.allowed[groups, wish]
            device = np.where(allowed, wish, problem.allowed.argmax(axis=1)).astype(np.int32)
            placement = Placement(problem.spaces.op_devices_of_groups(device))
            found.append((evaluate(placement).key, placement))
        return min(found, key=lambda pair: pair[0])[1]


class Devices(Objective):
    """Beside the placer: how many devices a plan uses, as if each were a nanosecond."""

    name, label = "devices", "devices"

    def value(self, timeline: Timeline) -> int:
        return sum(map(bool, timeline.order))

    def bound(self, problem: Problem, known: LowerBound) -> int:
        return 1


def test_it_keeps_the_contract_as_it_is() -> None:
    """It is checked, and places, without being known to the package."""
    check_placer(Alternate())


def test_one_line_makes_it_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, to whoever asks for one or for all."""
    with pytest.raises(InputError, match="alternate"):
        by_name("alternate")
    monkeypatch.setattr(placers, "PLAIN", (*placers.PLAIN, Alternate))
    assert by_name("alternate") == Alternate()
    assert Alternate in placers.PLAIN
    assert Alternate in placers.ALL


@pytest.mark.parametrize(
    "objective", [*placers.OBJECTIVES.values(), Devices()], ids=lambda goal: goal.name
)
def test_it_places_for_every_objective(objective: Objective) -> None:
    """Also for one that came after it: what a placer knows is the problem and the simulator."""
    for tiny in tiny_problems():
        if Alternate().supports(tiny.problem):
            continue
        found = place(tiny.problem, Alternate(), "9ev", objective=objective, allow_infeasible=True)
        assert found.placer == "alternate"
        assert found.value_ns >= found.bound_ns or not found.is_feasible
