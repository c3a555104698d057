"""ETF: earliest task first, aware of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.list_schedulers.earliest import EarliestFirst
from devplace.placers.list_schedulers.list_schedule import best_of, upward_rank
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Etf:
    """Among all ready ops and devices take the pair that can start first; ties by upward rank.

    Uses the accelerators; a device without room (by the running ledger) is passed over, and when
    no accelerator has room the op goes to the device with the most free memory, the CPU included.
    Transfers wait for their channels.

    Source: Hwang, Chow, Anger, Lee (1989), Scheduling precedence graphs in systems with
    interprocessor communication times, SIAM J. Computing 18(2). Differs from it in the memory rule,
    which is that of `m-etf`, in that transfers queue, and in that its order is not the only one
    simulated (`best_of`).
    """

    name: str = "etf"

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Build one schedule. O(N D log N)."""
        rank = upward_rank(problem, problem.accelerators).tolist()
        return best_of([EarliestFirst(problem, rank).build()], evaluate)
