"""The environment for outside agents."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from devplace.errors import InputError
from devplace.placers import Budget, Evaluator
from devplace.problem import Problem
from devplace.testing import hand_machine, hand_problem
from tests.research.cases import all_actions, layered, three_ops

pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env

from devplace.research.gym import PlacementEnv


def env_of(problem: Problem, episode: Any, evaluations: int = 1000, **options: Any) -> PlacementEnv:
    """An environment with its own evaluator."""
    evaluate = Evaluator(problem, Budget(evaluations=evaluations))
    return PlacementEnv(evaluate, episode, **options)


@pytest.mark.parametrize("episode", ["op", "group", "whole"])
@pytest.mark.parametrize("problem", [three_ops(), layered(3)], ids=["three ops", "layered"])
def test_it_passes_the_checker_of_gymnasium(episode: str, problem: Problem) -> None:
    """Spaces, seeds, determinism and fresh observations are as gymnasium demands."""
    check_env(env_of(problem, episode, groups=7), skip_render_check=True)


@pytest.mark.parametrize("episode", ["op", "group", "whole"])
def test_an_episode_is_one_evaluation_of_its_placement(episode: str) -> None:
    """For each of 8 placements: the reward is minus the root of its step, counted once."""
    env, problem = env_of(three_ops(), episode), three_ops()
    for number, actions in enumerate(all_actions(3, 2)):
        env.reset()
        for action in [actions] if episode == "whole" else actions.tolist():
            seen, reward, terminated, truncated, info = env.step(action)
        assert (terminated, truncated) == (True, False)
        assert seen["placed"].tolist() == actions.tolist()
        evaluate = Evaluator(problem, Budget())
        step = int(evaluate.batch(actions[None].astype(np.int32))[0][0])
        assert info == {"step_ns": step, "overflow_bytes": 0, "is_feasible": True}
        assert reward == pytest.approx(-((step / 1e9) ** 0.5))
        assert env.environment.evaluate.meter.num_evaluations == number + 1
    assert env.environment.best_key == (0, 28)


def test_groups_take_turns() -> None:
    """Each observation shows the group whose turn it is; only the last step earns something."""
    env = env_of(layered(3), "group", groups=5)
    count = env.environment.num_groups
    assert 1 < count <= 5
    seen, _ = env.reset()
    for turn in range(count):
        assert seen["turn"] == turn
        assert seen["features"].tolist() == env.table[turn].tolist()
        assert (seen["placed"] < 3).sum() == turn
        seen, reward, terminated, _, _ = env.step(turn % 3)
        assert terminated == (turn == count - 1)
        assert (reward < 0) == terminated
    with pytest.raises(InputError, match="call reset"):
        env.step(0)


def test_forbidden_devices_are_masked() -> None:
    """A pin shows in the mask, and holds whatever the action."""
    problem = hand_problem(
        "a = f ns=5 bytes=1 module=head\nb = f(a) ns=5 bytes=1",
        hand_machine({"gpu:0": 9, "gpu:1": 9}),
        pins={"head": "gpu:1"},
    )
    env = env_of(problem, "op")
    assert env.reset()[0]["mask"].tolist() == [0, 1]
    assert env.step(0)[0]["mask"].tolist() == [1, 1]
    env.step(0)
    best = env.environment.best()
    assert problem.task_devices(best).tolist() == [1, 0]


def test_a_spent_budget_truncates() -> None:
    """After the last evaluation episodes end truncated, without reward or result."""
    env = env_of(three_ops(), "whole", evaluations=1)
    env.reset()
    assert env.step(np.zeros(3, int))[2:4] == (True, False)
    env.reset()
    _, reward, terminated, truncated, info = env.step(np.zeros(3, int))
    assert (reward, terminated, truncated, info) == (0.0, False, True, {})


def test_failures_cost_what_the_rule_says() -> None:
    """A placement over the limits counts as 100 s, or as the caller's rule has it."""
    assert _reward(three_ops(memory=1)) == pytest.approx(-10.0)
    assert _reward(three_ops(memory=1), reward=lambda o: -o.overflow_bytes.astype(float)) < -0.5


def _reward(problem: Problem, **options: Any) -> float:
    env = env_of(problem, "whole", **options)
    env.reset()
    return env.step(np.zeros(3, int))[1]


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gymnasium the import says what to install."""
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "devplace.research.gym")
    with pytest.raises(InputError, match=r"pip install 'devplace\[gym\]'"):
        importlib.import_module("devplace.research.gym")


def test_kinds_of_episodes_are_checked() -> None:
    """A misspelt kind is told."""
    with pytest.raises(InputError, match="op, group or whole, got 'ops'"):
        env_of(three_ops(), "ops")


@pytest.mark.parametrize("action", [-1, 2, 0.5, None, "gpu:0", [0]])
def test_an_action_that_is_no_device_is_refused(action: Any) -> None:
    """Neither rounded nor counted from the end; what was placed before stays."""
    env = env_of(three_ops(), "op")
    env.reset()
    env.step(1)
    with pytest.raises(InputError, match=r"An action must be .*0 to 1, got"):
        env.step(action)
    assert env.step(0)[0]["placed"].tolist() == [1, 0, 2]


@pytest.mark.parametrize("action", [[0, 1], [0, -1, 1], [0, 1, 2], [0.0, 1.0, 1.0], 1])
def test_a_whole_action_has_a_device_for_each_group(action: Any) -> None:
    """Wrong number, range or kind: refused, and nothing is counted."""
    env = env_of(three_ops(), "whole")
    env.reset()
    with pytest.raises(InputError, match=r"An action must be .*0 to 1, got"):
        env.step(action)
    assert env.environment.evaluate.meter.num_evaluations == 0


def test_an_environment_needs_something_to_place() -> None:
    """A graph of sources alone, or no group, is refused in a sentence."""
    problem = hand_problem("x = input bytes=1", hand_machine({"gpu:0": 9, "gpu:1": 9}))
    with pytest.raises(InputError, match="sources and views only"):
        env_of(problem, "op")
    with pytest.raises(InputError, match="groups must be at least 1, got 0"):
        env_of(three_ops(), "group", groups=0)
