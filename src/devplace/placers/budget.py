"""The budget of a placer (evaluations, seconds, or both), and what is spent of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real

from devplace.errors import InputError
from devplace.units import NS_PER_S, parse_time_ns

DEFAULT_SECONDS = 30.0
LARGEST = {"seconds": 10**9, "evaluations": 2**53}
"""A time in ns, and a share of evaluations as a float, must be exact to count with."""


@dataclass(frozen=True)
class Budget:
    """Limits on a placer's work: wall-clock seconds, counted simulations, or both.

    The same evaluations and seed give the same plan; the same seconds need not.

    Attributes:
        seconds: Wall-clock time, s. None: no limit.
        evaluations: Simulations (or measured steps). None: no limit.

    Raises:
        InputError: A limit that is not positive, or beyond 30 years or 2^53 evaluations.
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("evaluations", self.evaluations)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise InputError(f"A budget's {name} must be a number, got {value!r}.")
            if value is not None and not value > 0:
                raise InputError(
                    f"A budget must be positive: {name} is {value}. Give for example 30s or 2000ev."
                )
            if value is not None and not value <= LARGEST[name]:
                raise InputError(
                    f"A budget must be finite: {name} is {value}, at most {LARGEST[name]:,} can be "
                    f"counted. Leave {name} out for no limit."
                )
        if self.evaluations is not None and not isinstance(self.evaluations, Integral):
            raise InputError(
                f"A budget has a whole number of evaluations, got {self.evaluations!r}. Round it."
            )

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self.seconds is not None or self.evaluations is not None

    @classmethod
    def parse(cls, text: str | Budget | None) -> Budget:
        """Budget from text: `30s`, `2min`, `2000ev`, or both with a comma.

        Example:
            >>> Budget.parse("2000ev")
            Budget(seconds=None, evaluations=2000)
            >>> Budget.parse("30s,500ev")
            Budget(seconds=30.0, evaluations=500)
        """
        if isinstance(text, Budget):
            return text
        if text is None:
            return cls(seconds=DEFAULT_SECONDS)
        seconds: float | None = None
        evaluations: int | None = None
        for part in str(text).split(","):
            match = re.fullmatch(r"\s*([0-9]+)\s*ev\s*", part)
            if (evaluations if match else seconds) is not None:
                what = "evaluations" if match else "time"
                raise InputError(
                    f"A budget has one number of each kind: {text!r} gives the {what} "
                    f"twice. Keep one."
                )
            if match:
                evaluations = int(match.group(1)[:20])  # beyond all limits, like more digits
                continue
            try:
                seconds = parse_time_ns(part.strip()) / NS_PER_S
            except InputError as error:
                raise InputError(
                    f"A budget must be a time or a number of evaluations, got {text!r}. "
                    f"Give for example 30s, 2min or 2000ev."
                ) from error
        return cls(seconds, evaluations)


class Meter:
    """What is spent of a budget: one clock and one count for all that spend it.

    Args:
        budget: What may be spent.
        progress: Called with the part spent, whenever something is counted.

    Attributes:
        budget: What may be spent; less within `limited_to`.
        num_evaluations: Evaluations counted.
    """

    def __init__(self, budget: Budget, progress: Callable[[float], None] | None = None) -> None:
        self.budget = budget
        self.num_evaluations = 0
        self._progress = progress
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall-clock time spent, s."""
        return time.monotonic() - self._started

    @property
    def exhausted(self) -> bool:
        """Whether the budget is used up."""
        limit, most = self.budget.seconds, self.budget.evaluations
        return (limit is not None and self.seconds >= limit) or (
            most is not None and self.num_evaluations >= most
        )

    @property
    def fraction_spent(self) -> float:
        """Part of the budget used, 0 to 1; the larger of time and evaluations."""
        parts = [0.0]
        if self.budget.seconds is not None:
            parts.append(self.seconds / self.budget.seconds)
        if self.budget.evaluations is not None:
            parts.append(self.num_evaluations / self.budget.evaluations)
        return min(1.0, max(parts))

    def left(self, wanted: int) -> int:
        """How many of so many evaluations may still be made."""
        most = self.budget.evaluations
        return wanted if most is None else max(0, min(wanted, most - self.num_evaluations))

    def count(self, evaluations: int) -> None:
        """So many more were made."""
        self.num_evaluations += evaluations

    def tell(self) -> None:
        """Tell how much is spent, once what was found is remembered."""
        if self._progress is not None:
            self._progress(self.fraction_spent)

    @contextmanager
    def limited_to(self, share: float) -> Iterator[None]:
        """Let only this part of what is left of the budget be spent."""
        whole = self.budget
        seconds, most = whole.seconds, whole.evaluations
        if seconds is not None:
            now = self.seconds
            seconds = max(1e-9, now + share * (seconds - now))
        if most is not None:
            most = max(1, self.num_evaluations + int(share * (most - self.num_evaluations)))
        self.budget = Budget(seconds, most)
        try:
            yield
        finally:
            self.budget = whole

    def go_on(self, num_evaluations: int, seconds: float) -> None:
        """As if so much had been spent before."""
        self.num_evaluations, self._started = num_evaluations, time.monotonic() - seconds
