"""The time budget of one `parallelize` call and how its phases share it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from devplace.placers import Budget

DEFAULT_SECONDS = 60.0
SEARCH_SHARE = 0.5
"""Part of what is left after capture that the search gets; confirming needs the rest."""
SHORTEST_SEARCH_S = 0.5
SHORTEST_CONFIRM_S = 15.0
"""Enough to start a process and run the best single device, whatever was spent before."""


@dataclass(frozen=True)
class BudgetClock:
    """Time since the start, against a budget.

    Attributes:
        seconds: Time for everything, s.
        evaluations: Simulations of the search; None if time decides.
    """

    seconds: float
    evaluations: int | None = None
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def parse(cls, text: str | Budget) -> BudgetClock:
        """From `60s`, `500ev` or both with a comma.

        Raises:
            InputError: Neither, or not positive.
        """
        budget = Budget.parse(text)
        return cls(budget.seconds or DEFAULT_SECONDS, budget.evaluations)

    @property
    def left_s(self) -> float:
        """Seconds left; negative when it is over."""
        return self.started + self.seconds - time.monotonic()

    @property
    def spent(self) -> float:
        """Part of the budget that is spent."""
        return 1 - self.left_s / self.seconds

    def shared_with(self, num_shapes: int) -> BudgetClock:
        """That of a step's first shape beside further ones, each of which gets half as much."""
        return replace(self, seconds=self.seconds * 2 / (2 + num_shapes))

    def search_budget(self, num_searches: int, confirms: bool) -> Budget:
        """What each of the remaining searches may spend."""
        if self.evaluations is not None:
            return Budget(evaluations=self.evaluations)
        share = SEARCH_SHARE if confirms else 0.9
        return Budget(seconds=max(SHORTEST_SEARCH_S, share * self.left_s / num_searches))

    def late_budget(self) -> Budget:
        """What the search for a shape that is met in training may spend: a tenth of the seconds."""
        if self.evaluations is not None:
            return Budget(evaluations=self.evaluations)
        return Budget(seconds=max(SHORTEST_SEARCH_S, self.seconds / 10))

    def confirm_seconds(self) -> float:
        """How long plans may be measured."""
        return max(SHORTEST_CONFIRM_S, self.left_s)
