"""m-ETF: earliest task first under memory limits, as in Baechi."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.list_schedulers.coplace import coplaced
from devplace.placers.list_schedulers.earliest import EarliestFirst
from devplace.placers.list_schedulers.list_schedule import best_of
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class MEtf:
    """Among all ready ops and accelerators with room take the pair that can start first; ties in
    topological order.

    An op needs room for its outputs and workspace, and for its group's sources when it is the
    group's first; outputs are released with their last reader. Transfers queue.

    Source: Jeon et al. (2020), Baechi: fast device placement of machine learning graphs, SoCC, and
    its released code. Differs from it in that memory is a ledger in schedule order, that received
    copies are counted in it, that a parameter goes to the first device that reads it, that an op
    for which no accelerator has room goes to the device with the most free memory instead of ending
    the attempt, and that its order is not the only one simulated (`best_of`). `etf` is the same
    without co-placement and with ties by upward rank.

    Attributes:
        coplace: Keep ops together as `coplaced` tells.
    """

    name: str = "m-etf"
    coplace: bool = True

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Build one schedule. O(N D log N)."""
        group = coplaced(problem) if self.coplace else None
        return best_of([EarliestFirst(problem, in_order(problem), group).build()], evaluate)


def in_order(problem: Problem) -> list[float]:
    """Priorities that prefer what comes first in topological order."""
    return [-float(task) for task in range(problem.core.tasks.num_tasks)]
