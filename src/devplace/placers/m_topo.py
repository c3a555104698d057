"""m-TOPO: topological order, an equal share of the memory for each device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.placers.evaluate import Evaluator
from devplace.placers.groups import I32, I64, accelerators, legal, op_devices
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class MTopo:
    """Ops in topological order onto the first accelerator until it holds its share of the memory,
    then onto the next.

    The share is `total / n + largest`, so all find a place on equal devices. An op needs its
    outputs and its workspace; a colocation group is placed as a whole with its first op and needs
    all outputs of its ops and the largest workspace. What is released meanwhile is not reckoned.

    Source: Jeon et al. (2020), Baechi: fast device placement of machine learning graphs, SoCC,
    section 3.1 (the uniform form with colocation). Differs from it in that a device never takes
    more than its own limit allows, and that what is then left over goes where most room is.
    """

    name: str = "m-topo"

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Fill the accelerators in turn. O(N)."""
        return Placement(op_devices(problem, legal(problem, _fill(problem))))


def group_bytes(problem: Problem) -> I64:
    """Memory each colocation group needs, all outputs at once. `[G]`"""
    tasks = problem.core.tasks
    total = np.zeros(tasks.num_groups, np.int64)
    np.add.at(total, tasks.group, tasks.made_bytes)
    workspace = np.zeros(tasks.num_groups, np.int64)
    np.maximum.at(workspace, tasks.group, tasks.workspace_bytes)
    for const, (first, last) in enumerate(
        zip(tasks.const_ptr[:-1], tasks.const_ptr[1:], strict=True)
    ):
        if last > first:  # a read-only source comes with its first reader
            total[tasks.group[tasks.const_user[first]]] += tasks.const_bytes[const]
    return total + workspace


def _fill(problem: Problem) -> I32:
    devices = accelerators(problem)
    need = group_bytes(problem)
    share = int(need.sum()) // len(devices) + int(need.max(initial=0))
    room = [min(share, problem.limit_bytes[d]) for d in devices]
    wish = np.full(len(need), -1, np.int32)
    place = 0
    for group in problem.core.tasks.group.tolist():
        if wish[group] >= 0:
            continue
        while place < len(devices) and room[place] < need[group]:
            place += 1
        at = place if place < len(devices) else int(np.argmax(room))
        wish[group] = devices[at]
        room[at] -= int(need[group])
    return wish
