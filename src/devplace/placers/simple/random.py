"""Random placements: the baseline every method must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.placers.colocation_groups import legal, op_devices
from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Random:
    """The best of as many uniformly random placements as the budget allows.

    Attributes:
        batch: Placements simulated at once.
        most: Placements tried when the budget sets no limit.
    """

    name: str = "random"
    batch: int = 8
    most: int = 1000

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Draw a usable device for every colocation group."""
        tasks = problem.core.tasks
        best_key: tuple[int, int] | None = None
        best = np.zeros(tasks.num_groups, np.int32)
        limited = evaluate.budget.seconds is not None or evaluate.budget.evaluations is not None
        for _ in range(10**9 if limited else self.most // self.batch):
            wish = rng.choice(np.array(problem.usable_devices), (self.batch, tasks.num_groups))
            groups = np.stack([legal(problem, row.astype(np.int32)) for row in wish])
            step, overflow = evaluate.batch(groups[:, tasks.group])
            for row in range(self.batch):
                key = (int(overflow[row]), int(step[row]))
                if best_key is None or key < best_key:
                    best_key, best = key, groups[row]
            if evaluate.exhausted:
                break
        return Placement(op_devices(problem, best))
