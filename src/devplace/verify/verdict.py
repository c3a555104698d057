"""What a verifier says of a solution."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Verdict:
    """A solution's value, computed anew, and the rules it breaks.

    Attributes:
        value: In the instance's own unit.
        broken: Rules broken, in words; empty for a valid solution.
        memory_bytes: Memory in use per device.
    """

    value: float
    broken: tuple[str, ...] = ()
    memory_bytes: tuple[float, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether no rule is broken."""
        return not self.broken


def exact(value: float) -> Fraction:
    """The number as it stands in the file: sums of these have no rounding."""
    return Fraction(value)
