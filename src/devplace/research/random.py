"""Random placements: the baseline every method must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.environment import Environment
from devplace.research.grouping import at_most
from devplace.research.options import check_settings


@dataclass(frozen=True)
class Random:
    """The best of as many uniformly random placements as the budget allows.

    Attributes:
        groups: Most groups that are placed, those of the systems that learn; 0: every colocation
            group by itself.
        batch: Placements simulated at once.
        most: Placements tried when the budget sets no limit.
    """

    name: str = "random"
    groups: int = 0
    batch: int = 8
    most: int = 1000

    def __post_init__(self) -> None:
        check_settings(self, zero=("groups",))

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Draw a usable device for every group."""
        environment = Environment(evaluate, at_most(problem, self.groups))
        limited = evaluate.meter.budget.is_limited
        for _ in range(10**9 if limited else self.most // self.batch):
            count = environment.room(self.batch)
            if not count:
                break
            size = count, environment.num_groups
            environment(rng.integers(environment.num_actions, size=size))
        return environment.best()
