"""The budget of a placer: evaluations, seconds, or both."""

from __future__ import annotations

import re
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
