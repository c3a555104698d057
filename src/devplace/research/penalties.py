"""What counts as bad: step times in seconds, with the rules for placements that fail.

A cost is what a system minimises; its reward is minus the cost. Durations are float seconds from
here on, as the constants of the papers are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.errors import InputError
from devplace.research.environment import Environment, Outcome
from devplace.units import NS_PER_S

F64 = NDArray[np.float64]
GB = 10**9


def failing_signal(outcome: Outcome, failing_s: float) -> F64:
    """Step seconds, or a constant for what failed. `[B]`

    Source: HDP's released code (100 s), its Trinity fork (10 s); ColocRL's rule without a number.
    """
    return np.where(outcome.failed, failing_s, outcome.step_ns / NS_PER_S)


def soft_penalty(outcome: Outcome, s_per_gb: float = 2.0, most_s: float = 10.0) -> F64:
    """Step seconds plus a penalty for each GB over the limits, at most `most_s` if any is. `[B]`

    Source: Placeto's released code (2 s per GB above 8 GB, capped at 10 s).
    """
    step = outcome.step_ns / NS_PER_S
    late = np.maximum(step, np.minimum(step + s_per_gb * outcome.overflow_bytes / GB, most_s))
    return np.where(outcome.failed, late, step)


def memory_rule(
    memory: str, environment: Environment, published: Callable[[Outcome], F64]
) -> PublishedRule | HardLimit:
    """The rule of a system's field `memory`: `published` is the paper's own, `hard` is `HardLimit`.

    Raises:
        InputError: Neither.
    """
    if memory == "published":
        return PublishedRule(published)
    if memory == "hard":
        return HardLimit(environment.limit_bytes)
    raise InputError(f"The memory rule of a placer must be published or hard, got {memory!r}.")


class PublishedRule:
    """A paper's own rule; has no state."""

    def __init__(self, rule: Callable[[Outcome], F64]) -> None:
        self._rule = rule

    def __call__(self, outcome: Outcome) -> F64:
        """Costs. `[B]`"""
        return self._rule(outcome)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`: nothing."""


class HardLimit:
    """Step seconds of what fits; whatever does not fit costs more than all that did so far.

    The more bytes over the limits, the worse: `worst (1 + overflow / limits)`, where `worst` is
    the longest step seen. So memory is a hard constraint, yet failures still show a direction.

    Args:
        limit_bytes: Memory limits of the usable devices, summed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = max(1, limit_bytes)
        self._worst_s = 0.0

    def __call__(self, outcome: Outcome) -> F64:
        """Costs. `[B]`"""
        step = outcome.step_ns / NS_PER_S
        self._worst_s = max(self._worst_s, float(step.max(initial=0.0)))
        late = self._worst_s * (1 + outcome.overflow_bytes / self._limit_bytes)
        return np.where(outcome.failed, late, step)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"worst_s": self._worst_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""
        self._worst_s = state["worst_s"]


def sqrt_reward(cost_s: F64) -> F64:
    """Minus the square root of the cost: long steps do not drown the others. `[B]`

    Source: Mirhoseini et al. (2017), arXiv 1706.04972, and (2018), ICLR.
    """
    return -np.sqrt(cost_s)


class MovingAverage:
    """Exponential moving average of rewards, the baseline of ColocRL and HDP.

    `b <- decay b + (1 - decay) mean(reward)`. The first rewards start it, unless `start` does.
    """

    def __init__(self, decay: float, start: float | None = None) -> None:
        self._decay = decay
        self.value = start

    def update(self, rewards: F64) -> float:
        """Take new rewards in; gives the baseline to compare these with (from before them)."""
        if not len(rewards):
            return self.value or 0.0
        mean = float(np.mean(rewards))
        before = mean if self.value is None else self.value
        self.value = self._decay * before + (1 - self._decay) * mean
        return before

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""
        self.value = state["value"]
