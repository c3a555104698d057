"""The groupings of a problem that the placer `learned` chooses from: a few counts of groups."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.rl.count_head import FACTORS, RULE
from devplace.placers.rl.environment import Environment, Outcome
from devplace.placers.rl.grouping import Grouping
from devplace.placers.rl.sized_groups import parted, worth_parting
from devplace.placers.rl.state_features import Scene
from devplace.problem import Placement

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

MOST = 512
"""Groups at most, if the rule has no more."""


class Partings:
    """The groupings of one problem that can be chosen from, all scored by one evaluator.

    The environment and the scene of a count are made when they are first asked for.

    Args:
        evaluate: The counted evaluator.

    Attributes:
        problem: What is placed.
        counts: Groups wanted by each choice; a grouping may have a few less.
        is_open: Choices that differ from those nearer to the rule. bool `[C]`
    """

    def __init__(self, evaluate: Evaluator) -> None:
        self.evaluate, self.problem = evaluate, evaluate.problem
        self._rule = worth_parting(self.problem)
        self.counts = counts_around(
            self._rule.num_groups,
            self.problem.core.tasks.num_groups,
            len(self.problem.usable_devices),
        )
        self.is_open = _distinct(self.counts)
        self._environments: dict[int, Environment] = {}
        self._scenes: dict[int, Scene] = {}

    def grouping(self, choice: int) -> Grouping:
        """Groups of a choice."""
        return self.environment(choice).grouping

    def environment(self, choice: int) -> Environment:
        """Where placements of a choice's groups are scored."""
        if choice not in self._environments:
            grouping = parted(self._rule, self.counts[choice])
            self._environments[choice] = Environment(self.evaluate, grouping)
        return self._environments[choice]

    def scene(self, choice: int) -> Scene:
        """What the policy sees of a choice's groups."""
        if choice not in self._scenes:
            self._scenes[choice] = Scene(self.environment(choice))
        return self._scenes[choice]

    @property
    def summary(self) -> F32:
        """What the choice of a count goes by. `[PROBLEM_FEATURES]`"""
        return self.scene(RULE).summary

    @property
    def num_actions(self) -> int:
        """Devices to choose from."""
        return self.environment(RULE).num_actions

    @property
    def limit_bytes(self) -> int:
        """Memory limits of the usable devices, summed."""
        return self.environment(RULE).limit_bytes

    def room(self, wanted: int) -> int:
        """How many of `wanted` placements the budget still allows; 0 when it is spent."""
        return self.environment(RULE).room(wanted)

    @property
    def is_cut(self) -> bool:
        """Whether the budget allowed fewer placements than were wanted once."""
        return self.environment(RULE).is_cut

    @property
    def best_key(self) -> tuple[int, int] | None:
        """Overflow and step time of the best so far, whatever its count."""
        best = self._best()
        return None if best is None else best.best_key

    def best(self) -> Placement:
        """The best placement scored: one that fits if there was one, else the nearest to it."""
        return (self._best() or self.environment(RULE)).best()

    def _best(self) -> Environment | None:
        scored = [each for each in self._environments.values() if each.best_key is not None]
        return min(scored, key=lambda each: each.best_key or (0, 0), default=None)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {str(choice): each.state_dict() for choice, each in self._environments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""
        for choice, each in state.items():
            self.environment(int(choice)).load_state_dict(each)


def counts_around(rule: int, most: int, devices: int) -> tuple[int, ...]:
    """Counts to choose from: multiples of the rule's, within bounds. `[C]`

    Args:
        rule: Groups that the rule makes.
        most: Colocation groups.
        devices: Usable ones; there are no fewer groups, unless the rule makes fewer.
    """
    low, high = min(rule, devices), max(rule, min(most, MOST))
    return tuple(min(high, max(low, round(rule * factor))) for factor in FACTORS)


def joined_outcomes(outcomes: list[Outcome]) -> Outcome:
    """Outcomes of several environments, one after the other."""
    return Outcome(
        np.concatenate([each.step_ns for each in outcomes]),
        np.concatenate([each.overflow_bytes for each in outcomes]),
    )


def _distinct(counts: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which counts differ from all that are nearer to the rule's. `[C]`"""
    found, known = np.zeros(len(counts), bool), set()
    for choice in sorted(range(len(counts)), key=lambda each: abs(each - RULE)):
        found[choice] = counts[choice] not in known
        known.add(counts[choice])
    return found
