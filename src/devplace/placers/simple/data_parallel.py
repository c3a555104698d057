"""Micro-batches side by side: data parallelism as a placement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.placers.colocation_groups import legal
from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class DataParallel:
    """The k-th micro-batch on the k-th accelerator (over and over); parameters with their state and
    update, and all else, spread by size.

    Gradients are then summed along the micro-batches and meet their parameter at its home, as with
    sharded optimizer state.

    Source: Rajbhandari, Rasley, Ruwase, He (2020), ZeRO, arXiv 1910.02054, section 5, stages 1 and
    2; differs from it in: sums run along a chain of devices, not through collectives.
    """

    name: str = "data-parallel"

    def supports(self, problem: Problem) -> str:
        """When the step was captured with several micro-batches."""
        if _num_micro_batches(problem) < 2:
            return "needs micro_batches=2 or more"
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Place by micro-batch."""
        return data_parallel(problem, problem.accelerators)


def data_parallel(problem: Problem, devices: list[int]) -> Placement:
    """Micro-batch k on `devices[k % len(devices)]`, everything else spread by size."""
    tasks = problem.core.tasks
    batch = problem.spaces.tasks_from_ops(np.array([op.micro_batch for op in problem.graph.ops]))
    batch_of_group = np.full(tasks.num_groups, -1)
    np.maximum.at(batch_of_group, tasks.group, batch)
    kept = problem.spaces.groups_sum(np.where(tasks.is_source > 0, tasks.made_bytes, 0))
    wish = np.zeros(tasks.num_groups, np.int32)
    load = np.zeros(len(devices), np.int64)
    for group in np.argsort(-kept, kind="stable"):
        if batch_of_group[group] >= 0 and kept[group] == 0:
            place = int(batch_of_group[group]) % len(devices)
        else:
            place = int(load.argmin())
            load[place] += kept[group]
        wish[group] = devices[place]
    return Placement(problem.spaces.op_devices_of_groups(legal(problem, wish)))


def _num_micro_batches(problem: Problem) -> int:
    return len({op.micro_batch for op in problem.graph.ops if op.micro_batch >= 0})
