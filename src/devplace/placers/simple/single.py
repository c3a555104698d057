"""Everything on one device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.errors import ProblemError
from devplace.placers.colocation_groups import legal
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.orders import best_score
from devplace.problem import Placement, Problem


def all_on(problem: Problem, device: int) -> Placement:
    """Every op on one device, except what is not allowed there."""
    wish = np.full(problem.core.tasks.num_groups, device, np.int32)
    return Placement(problem.spaces.op_devices_of_groups(legal(problem, wish)))


@dataclass(frozen=True)
class Single:
    """The best single device; pins and unsupported ops still hold."""

    name: str = "single"

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Try each usable device."""
        placements = [all_on(problem, device) for device in problem.usable_devices]
        return min(placements, key=lambda placement: best_score(evaluate, placement).key)


@dataclass(frozen=True)
class Cpu:
    """Everything on the CPU."""

    name: str = "cpu"

    def supports(self, problem: Problem) -> str:
        """Only on a machine with a usable CPU device."""
        return "" if _cpus(problem) else "no CPU may be used (beside GPUs: uses_cpu=True, --cpu)"

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Try each CPU device."""
        devices = _cpus(problem)
        if not devices:
            raise ProblemError("Placer cpu needs a CPU device. Choose another placer or machine.")
        placements = [all_on(problem, device) for device in devices]
        return min(placements, key=lambda placement: best_score(evaluate, placement).key)


def _cpus(problem: Problem) -> list[int]:
    devices = problem.machine.devices
    return [d for d in problem.usable_devices if devices[d].traits.is_host]
