"""The protocol of a placer."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem


class Placer(Protocol):
    """A frozen record of hyper-parameters that can be called.

    The smallest one: put everything on the first usable device.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class First:
        ...     name = "first"
        ...     def supports(self, problem):
        ...         return ""
        ...     def __call__(self, problem, evaluate, rng):
        ...         device = problem.usable_devices[0]
        ...         return Placement(np.full(len(problem.graph.ops), device, np.int32))
    """

    @property
    def name(self) -> str:
        """Name on the command line and in reports."""
        ...

    def supports(self, problem: Problem) -> str:
        """Empty if the placer can work on this problem, else the reason why not."""
        ...

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Place every op, spending `evaluate` as long as `not evaluate.exhausted`."""
        ...
