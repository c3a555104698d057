"""Limits on the effort of a max-load search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SolverEffort:
    """What a search may spend.

    Attributes:
        seconds: Wall-clock time; None where only moves count, on one thread, so that the answer
            depends on the seed alone.
        evaluations: Moves tried and placements simulated; None for no limit.
        seed: Of all randomness.
        threads: Threads of the search.
    """

    seconds: float | None = 30.0
    evaluations: int | None = None
    seed: int = 0
    threads: int = 2
