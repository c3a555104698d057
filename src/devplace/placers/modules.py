"""Modules in forward order: the units that device maps and even splits divide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.graph import Op
from devplace.graph.members import module_shares, parts_of
from devplace.placers.colocation_groups import by_vote, mean_duration_ns
from devplace.problem import Placement, Problem

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
_WHOLE = 10**9  # divided among the modules of a group, to compare them


@dataclass(frozen=True, eq=False)
class ModuleChain:
    """Modules of a model in forward order, with what each costs.

    Ops that belong to the model itself (`""`) and to containers count with the module that made
    what they read. A fused group belongs to the module that makes most of it; modules all of whose
    ops lie in groups of others are in the chain too, with no time of their own.

    Attributes:
        names: Module paths.
        of_task: Module of each task. `[N]`
        time_ns: Time of each module's ops on a mean accelerator. `[M]`
        bytes: Memory each module needs: parameters, state, gradients, and the outputs of its
            forward ops (kept for the backward pass when there is one). `[M]`
    """

    names: tuple[str, ...]
    of_task: I32
    time_ns: F64
    bytes: I64

    def place(self, problem: Problem, device_of_module: I32) -> Placement:
        """Placement with every module's ops on its device; groups follow their costliest op."""
        weight = mean_duration_ns(problem)
        groups = by_vote(problem, device_of_module[self.of_task].astype(np.int32), weight)
        return Placement(problem.spaces.op_devices_of_groups(groups))


def module_chain(problem: Problem) -> ModuleChain:
    """The chain of modules of this problem's graph."""
    graph, tasks = problem.graph, problem.core.tasks
    leaf = _leaf_modules(problem)
    producer = tasks.carrier_maker
    owner: list[str | None] = [None] * tasks.num_tasks
    for task, index in enumerate(tasks.task_op):
        owner[task] = _leaf_of(graph.ops[index], leaf)
        if owner[task] is not None:
            continue
        makers = producer[tasks.in_carrier[tasks.in_ptr[task] : tasks.in_ptr[task + 1]]]
        owner[task] = next((owner[m] for m in makers[::-1] if owner[m] is not None), None)
    rank: dict[str, int] = {}
    for task, index in enumerate(tasks.task_op):
        found = owner[task]
        op = graph.ops[index]
        if found is not None and op.stage == "forward":
            rank.setdefault(found, len(rank))
        for member in op.members:
            if member.module in leaf and member.stage == "forward" and not member.is_view:
                rank.setdefault(member.module, len(rank))
    for found in owner:
        if found is not None:
            rank.setdefault(found, len(rank))
    if not rank:
        rank[""] = 0
    of_task = np.array([rank.get(name, 0) if name is not None else 0 for name in owner], np.int32)
    time = np.bincount(of_task, mean_duration_ns(problem), len(rank)).astype(np.float64)
    return ModuleChain(tuple(rank), of_task, time, _module_bytes(problem, of_task, len(rank)))


def _leaf_of(op: Op, leaf: set[str]) -> str | None:
    """The module that an op belongs to, of a fused group the one that makes most of it."""
    if op.module in leaf:
        return op.module
    shares = {m: n for m, n in module_shares(op, _WHOLE).items() if m in leaf and n}
    return max(shares, key=lambda module: shares[module], default=None)


def _leaf_modules(problem: Problem) -> set[str]:
    paths = {part.module for op in problem.graph.ops for part in parts_of(op) if part.module}
    parents = {path.rpartition(".")[0] for path in paths}
    return paths - parents


def _module_bytes(problem: Problem, of_task: I32, count: int) -> I64:
    graph, tasks = problem.graph, problem.core.tasks
    trains = any(op.stage == "backward" for op in graph.ops)
    size = tasks.made_bytes
    total = np.zeros(count, np.int64)
    for task, index in enumerate(tasks.task_op):
        op = graph.ops[index]
        if op.is_source:
            # its gradient takes as much again
            total[of_task[task]] += size[task] * (2 if op.role == "parameter" and trains else 1)
        elif op.stage == "forward" and trains:
            total[of_task[task]] += size[task]
    for const, begin in enumerate(tasks.const_ptr[:-1]):
        users = tasks.const_user[begin : tasks.const_ptr[const + 1]]
        for module in {int(of_task[user]) for user in users}:
            total[module] += tasks.const_bytes[const]
    return total
