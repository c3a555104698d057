"""Random sampling and the plain climber, with the groups of the systems that learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from devplace.errors import InputError, ProblemError
from devplace.placers import Budget, Climb, Evaluator, Random, place
from devplace.problem import Problem
from devplace.research.environment import Environment, Outcome
from devplace.research.grouping import at_most, colocated
from devplace.testing import brute_force, hand_machine, hand_problem
from tests.research.cases import environment, layered, three_ops
from tests.strategies import random_problem


def seen(monkeypatch: pytest.MonkeyPatch, placer: Any, problem: Problem, budget: int) -> Any:
    """Actions that were scored `[B, M]`, and what they gave."""
    actions: list[Any] = []
    outcomes: list[Outcome] = []
    original = Environment.__call__

    def score(self: Environment, wanted: Any) -> Outcome:
        outcomes.append(original(self, wanted))
        actions.extend(np.asarray(wanted).tolist())
        return outcomes[-1]

    monkeypatch.setattr(Environment, "__call__", score)
    placer(problem, Evaluator(problem, Budget(evaluations=budget)), np.random.default_rng(0))
    step = np.concatenate([outcome.step_ns for outcome in outcomes])
    overflow = np.concatenate([outcome.overflow_bytes for outcome in outcomes])
    return np.array(actions), step, overflow


@pytest.mark.parametrize("kind", [Random, Climb])
@pytest.mark.parametrize("groups", [0, 1, 7])
def test_they_place_the_groups_of_the_systems(
    kind: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as `colocated` makes of that most; 0 is every colocation group, whatever is drawn."""
    problem = layered()
    count = colocated(problem, groups).num_groups if groups else problem.core.tasks.num_groups
    actions, *_ = seen(monkeypatch, kind(groups=groups), problem, 40)
    assert actions.shape == (40, count)
    assert actions.min() >= 0
    assert actions.max() < len(problem.usable_devices)


RULES = {
    "hard": lambda step, over: (over, step),
    "constant": lambda step, over: (over > 0, 0 if over else step),
    "per GB": lambda step, over: step + 2 * over,  # 2 s per 10^9 bytes are 2 ns per byte
}


@pytest.mark.parametrize("rule", list(RULES))
def test_a_climb_moves_one_group_of_what_is_not_worse(
    rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each placement differs in one group from the last that was as good, by the rule for memory,
    as the one before it: most bytes over count, or only whether there are any, or all in time."""
    problem = hand_problem(
        "x = input bytes=1\n"
        + "\n".join(f"a{k} = f(x) bytes=30 ns={9 + k} result=output" for k in range(12)),
        hand_machine({"gpu:0": 100, "gpu:1": 230}),
    )
    actions, step, overflow = seen(monkeypatch, Climb(groups=0, memory=rule), problem, 200)
    keys = [RULES[rule](int(one), int(over)) for one, over in zip(step, overflow, strict=True)]
    now = 0
    for tried in range(1, len(actions)):
        assert (actions[tried] != actions[now]).sum() == 1
        now = tried if keys[tried] <= keys[now] else now
    assert now > 0
    assert overflow.any()


def test_a_climb_ends_where_no_move_of_one_group_helps() -> None:
    """On three ops no neighbour is faster, and some seed ends at the optimum, 28 ns."""
    found = [place(three_ops(), Climb(), "200ev", seed) for seed in range(5)]
    every = environment(three_ops())
    for one in found:
        devices = three_ops().task_devices(one.placement)
        nearby = [np.where(np.arange(3) == group, 1 - devices, devices) for group in range(3)]
        assert (every(np.array(nearby)).step_ns >= one.step_ns).all()
    assert min(one.step_ns for one in found) == brute_force(three_ops()).step_ns == 28


def test_a_climb_beats_random_sampling_of_the_same_groups() -> None:
    """On 48 groups and 3 devices, at the same budget."""
    for groups in (0, 16):
        steps = [
            place(layered(), kind(groups=groups), "400ev", 0).step_ns for kind in (Climb, Random)
        ]
        assert steps[0] < steps[1]


def test_a_climb_goes_by_measured_steps() -> None:
    """With a measurement that likes the last device, everything ends there."""
    problem = layered(3)

    def measure(placement: Any) -> int | None:
        return 1000 - int((problem.task_devices(placement) == 2).sum())

    found = place(problem, Climb(groups=0), "400ev", 0, measure=measure)
    assert (problem.task_devices(found.placement) == 2).all()


def test_where_nothing_can_move_one_evaluation_is_enough() -> None:
    """A group that may go to one device only stays there, and the climb ends."""
    problem = hand_problem("a = f ns=5 bytes=1", hand_machine({"gpu:0": 9}))
    found = place(problem, Climb(), "100ev", 0)
    assert (found.evaluations, found.step_ns) == (1, 5)


def test_without_a_limit_it_ends() -> None:
    """By `most` placements where the budget is open."""
    problem = layered(3)
    evaluate = Evaluator(problem, Budget())
    Climb(most=30)(problem, evaluate, np.random.default_rng(0))
    assert evaluate.meter.num_evaluations == 30


def test_settings_that_make_no_sense_are_refused() -> None:
    """Counts below 0 and rules that there are not; graphs without ops."""
    with pytest.raises(InputError, match="groups of placer random must be"):
        Random(groups=-1)
    with pytest.raises(InputError, match="hard or constant or per GB, got 'soft'"):
        Climb(memory="soft")  # type: ignore[arg-type]
    sources = hand_problem("x = input bytes=1", hand_machine({"gpu:0": 9, "gpu:1": 9}))
    with pytest.raises(ProblemError, match="sources and views only"):
        place(sources, Climb(), "20ev", 0)


def test_no_groups_wanted_means_all_by_themselves() -> None:
    """`at_most(0)` numbers colocation groups as they are."""
    problem = random_problem(3, 25, 3)
    assert at_most(problem, 0).num_groups == problem.core.tasks.num_groups
    assert at_most(problem, 4).num_groups <= 4
