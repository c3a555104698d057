"""What counts as bad."""

from __future__ import annotations

import numpy as np
import pytest

from devplace.errors import InputError
from devplace.research.environment import Outcome
from devplace.research.penalties import (
    HardLimit,
    MovingAverage,
    failing_signal,
    memory_rule,
    soft_penalty,
    sqrt_reward,
)
from tests.research.cases import environment, three_ops

S, GB = 10**9, 10**9


def outcome(steps_s: list[float], over_gb: list[float]) -> Outcome:
    """Steps in seconds, overflows in GB."""
    return Outcome(
        np.array([round(s * S) for s in steps_s]), np.array([round(g * GB) for g in over_gb])
    )


def test_shorter_steps_have_higher_rewards() -> None:
    """Rewards fall with the step: 1 s is -1, 4 s is -2."""
    assert sqrt_reward(np.array([1.0, 4.0])).tolist() == [-1.0, -2.0]


def test_failing_signal_replaces_the_step_of_what_fails() -> None:
    """HDP's 100 s: the reward of a failure is -10."""
    cost = failing_signal(outcome([2, 0.5], [0, 1]), 100.0)
    assert cost.tolist() == [2.0, 100.0]
    assert sqrt_reward(cost)[1] == -10


def test_soft_penalty_is_placetos() -> None:
    """2 s per GB over the limit, capped at 10 s; a longer step keeps its time, what fits pays
    nothing."""
    cost = soft_penalty(outcome([1, 1, 1, 30, 12], [0, 1.5, 90, 0, 1]))
    assert cost.tolist() == [1.0, 4.0, 10.0, 30.0, 12.0]


def test_hard_limit_puts_failures_behind_all_that_fit() -> None:
    """Whatever fits is cheaper than what does not, and fewer bytes over are better than more."""
    rule = HardLimit(10 * GB)
    assert rule(outcome([5, 1, 2], [0, 1, 5])).tolist() == [5.0, 5.5, 7.5]
    again = HardLimit(10 * GB)
    again.load_state_dict(rule.state_dict())
    assert again(outcome([1], [1])).tolist() == [5.5]


def test_moving_average_starts_with_the_first_rewards() -> None:
    """The baseline is that from before the rewards it is compared with."""
    baseline = MovingAverage(0.9)
    assert baseline.update(np.array([2.0, 4.0])) == 3.0
    assert baseline.update(np.array([13.0])) == 3.0
    assert baseline.value == pytest.approx(4.0)
    assert baseline.update(np.array([])) == pytest.approx(4.0)
    assert MovingAverage(0.9, -10.0).update(np.array([0.0])) == -10.0


def test_unknown_memory_rules_are_refused() -> None:
    """Only `published` and `hard` exist."""
    with pytest.raises(InputError, match="must be published or hard, got 'soft'"):
        memory_rule("soft", environment(three_ops()), lambda found: found.step_ns / S)
