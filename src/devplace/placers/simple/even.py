"""Equal shares of the work in order, the usual manual split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.colocation_groups import by_vote, mean_duration_ns
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.modules import ModuleChain, module_chain
from devplace.problem import Placement, Problem


def shares(weight: NDArray[np.float64], count: int) -> NDArray[np.int32]:
    """Cut a sequence into `count` runs of about equal weight; each item's run. int32 `[len]`

    Example:
        >>> shares(np.array([1.0, 1.0, 1.0, 3.0]), 2).tolist()
        [0, 0, 0, 1]
    """
    total = float(weight.sum())
    if total <= 0:
        return np.minimum(np.arange(len(weight)) * count // max(1, len(weight)), count - 1).astype(
            np.int32
        )
    middle = np.cumsum(weight) - weight / 2
    return np.minimum(middle * count / total, count - 1).astype(np.int32)


def even_split(problem: Problem, chain: ModuleChain, devices: list[int]) -> Placement:
    """Modules in forward order over `devices`, equal compute time each; backward and update ops
    stay with their module."""
    return chain.place(problem, np.array(devices, np.int32)[shares(chain.time_ns, len(devices))])


def there_and_back(problem: Problem, chain: ModuleChain, devices: list[int]) -> Placement:
    """Modules in forward order over `devices` and back: two runs of modules on each, so that the
    device that makes the loss is the one that the batch enters.

    In a pipeline of micro-batches the first gradients come back sooner.

    Source: Qi, Wan, Huang, Lin (2023), Zero bubble pipeline parallelism, arXiv 2401.10241, section
    6 (ZB-V). Differs from it in that only the placement is taken.
    """
    both = np.array([*devices, *devices[::-1]], np.int32)
    return chain.place(problem, both[shares(chain.time_ns, len(both))])


@dataclass(frozen=True)
class Even:
    """Modules in forward order, equal compute time per accelerator."""

    name: str = "even"

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Split over all accelerators."""
        return even_split(problem, module_chain(problem), problem.accelerators)


@dataclass(frozen=True)
class Topo:
    """Ops in topological order, equal compute time per accelerator."""

    name: str = "topo"

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Split over all accelerators."""
        weight = mean_duration_ns(problem)
        devices = problem.accelerators
        wish = np.array(devices, np.int32)[shares(weight, len(devices))]
        return Placement(problem.spaces.op_devices_of_groups(by_vote(problem, wish, weight)))
