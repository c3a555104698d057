"""m-TOPO: topological order, an equal share of the memory for each device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.placers.colocation_groups import I32, I64, legal
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.list_schedulers.coplace import coplaced
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class MTopo:
    """Ops in topological order onto the first accelerator until it holds its share of the memory,
    then onto the next.

    The share is `total / n + largest`, so all find a place on equal devices. Ops that belong
    together are placed as one with the first of them and need all their outputs and the largest
    workspace. What is released meanwhile is not reckoned.

    Source: Jeon et al. (2020), Baechi: fast device placement of machine learning graphs, SoCC, and
    its released code (the uniform form with colocation). Differs from it in that a device never
    takes more than its own limit allows, and that what is then left over goes where most room is.

    Attributes:
        coplace: Keep ops together as `coplaced` tells.
    """

    name: str = "m-topo"
    coplace: bool = True

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Fill the accelerators in turn. O(N)."""
        tasks = problem.core.tasks
        unit = coplaced(problem) if self.coplace else tasks.group
        wish = np.zeros(tasks.num_groups, np.int32)
        wish[tasks.group] = _fill(problem, unit)[unit]
        return Placement(problem.spaces.op_devices_of_groups(legal(problem, wish)))


def unit_bytes(problem: Problem, unit: I32) -> I64:
    """Memory each unit needs, all outputs at once. `[U]`"""
    tasks = problem.core.tasks
    total = np.zeros(int(unit.max(initial=-1)) + 1, np.int64)
    workspace = np.zeros_like(total)
    np.add.at(total, unit, tasks.made_bytes)
    np.maximum.at(workspace, unit, tasks.workspace_bytes)
    read = tasks.const_ptr[1:] > tasks.const_ptr[:-1]
    first_reader = tasks.const_user[tasks.const_ptr[:-1][read]]
    np.add.at(total, unit[first_reader], tasks.const_bytes[read])
    return total + workspace


def _fill(problem: Problem, unit: I32) -> I32:
    """Device of each unit. `[U]`"""
    devices = problem.accelerators
    need = unit_bytes(problem, unit)
    share = int(need.sum()) // len(devices) + int(need.max(initial=0))
    room = [min(share, problem.limit_bytes[d]) for d in devices]
    wish = np.full(len(need), -1, np.int32)
    place = 0
    for own in unit.tolist():
        if wish[own] >= 0:
            continue
        while place < len(devices) and room[place] < need[own]:
            place += 1
        at = place if place < len(devices) else int(np.argmax(room))
        wish[own] = devices[at]
        room[at] -= int(need[own])
    return wish
