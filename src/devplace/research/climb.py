"""A plain climber: what a method that learns must beat with the same groups, devices and budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.environment import Environment, Outcome, nothing_to_place
from devplace.research.grouping import at_most
from devplace.research.options import check_settings
from devplace.research.penalties import HardLimit, failing_signal, soft_penalty


@dataclass(frozen=True)
class Climb:
    """From a random placement, one random group at a time goes to another random device; a move
    that makes nothing worse stays.

    It keeps one placement, has no restart, no temperature and nothing to tune.

    Source: the (1+1) evolution strategy of Rechenberg (1973), Evolutionsstrategie, with a move of
    one group as its mutation.

    Attributes:
        groups: Most groups that are placed, those of the systems that learn; 0: every colocation
            group by itself.
        memory: What a placement that fails costs, one of the systems' rules: `hard`, more than all
            that fit, by its bytes over the limits; `constant`, all the same; `per GB`, Placeto's.
        most: Placements tried when the budget sets no limit.
    """

    name: str = "climb"
    groups: int = 64
    memory: Literal["hard", "constant", "per GB"] = "hard"
    most: int = 1000

    def __post_init__(self) -> None:
        check_settings(self, zero=("groups",))

    def supports(self, problem: Problem) -> str:
        """Wherever there are ops to place."""
        return nothing_to_place(problem)

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Climb until the budget is spent; gives the best placement seen."""
        environment = Environment(evaluate, at_most(problem, self.groups))
        allowed = environment.allowed
        movable = np.flatnonzero(allowed.sum(axis=1) > 1)
        now = np.where(allowed, rng.random(allowed.shape), -1.0).argmax(axis=1)
        cost = HardLimit(environment.limit_bytes) if self.memory == "hard" else self._cost
        found = environment(now[None])
        limited = evaluate.meter.budget.is_limited
        for _ in range(10**9 if limited else self.most - 1):
            if not (len(movable) and environment.room(1)):
                break
            tried, group = now.copy(), rng.choice(movable)
            others = np.flatnonzero(allowed[group])
            tried[group] = rng.choice(others[others != now[group]])
            next_found = environment(tried[None])
            before, after = cost(_both(found, next_found))
            if after <= before:
                now, found = tried, next_found
        return environment.best()

    def _cost(self, outcome: Outcome) -> NDArray[np.float64]:
        """Costs by a rule without a state. `[B]`"""
        return (
            failing_signal(outcome, 100.0) if self.memory == "constant" else soft_penalty(outcome)
        )


def _both(one: Outcome, other: Outcome) -> Outcome:
    """Outcomes of two placements, compared under one rule."""
    return Outcome(
        np.append(one.step_ns, other.step_ns),
        np.append(one.overflow_bytes, other.overflow_bytes),
    )
