"""Apply pins to the ops that read a pinned weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from devplace.graph import OpGraph
from devplace.graph.patterns import matches
from devplace.problem.core import Tasks


class ByWeight(NamedTuple):
    """A pin that reaches a task through a weight.

    Attributes:
        pattern: Index of the pattern, -1 if the weight is not pinned.
        module: Module of the weight.
    """

    pattern: int
    module: str


def pins_by_weight(graph: OpGraph, tasks: Tasks, patterns: Sequence[str]) -> dict[int, ByWeight]:
    """The first pin that names a weight which a task reads, also by another name of a tied one.

    What is computed of weights of one module alone, such as a copy of lower precision, counts as a
    weight.

    Args:
        graph: The step.
        tasks: Its tasks.
        patterns: Patterns of pins; of several the first counts.

    Returns:
        Task -> pin: of what reads pinned weights, and of these weights themselves.

    Complexity: O(N + E).
    """
    names: dict[str, list[str]] = {}
    for alias, first in graph.meta.get("tied", {}).items():
        names.setdefault(first, []).append(alias)

    def weight(op_index: int) -> ByWeight | None:
        op = graph.ops[op_index]
        if op.role != "parameter":
            return None
        each = [op] + [
            msgspec.structs.replace(op, name=name, module=name.rpartition(".")[0])
            for name in names.get(op.name, ())
        ]
        hits = ((k, one) for k, p in enumerate(patterns) for one in each if matches(p, one))
        k, one = next(hits, (-1, op))
        return ByWeight(k, one.module)

    read: list[list[ByWeight | None]] = [[] for _ in range(tasks.num_tasks)]
    for const, op_index in enumerate(tasks.const_op.tolist()):
        pin = weight(op_index)
        for user in tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]].tolist():
            read[user].append(pin)
    made: list[ByWeight | None] = []  # of tasks that count as weights
    found: dict[int, ByWeight] = {}
    makers, ends = tasks.carrier_maker[tasks.in_carrier].tolist(), tasks.in_ptr.tolist()
    for task, op_index in enumerate(tasks.task_op.tolist()):
        if tasks.is_source[task]:
            made.append(weight(op_index))
        else:
            before = makers[ends[task] : ends[task + 1]]
            read[task] += [made[k] if k < task else None for k in before]
            modules = {one and one.module for one in read[task]}
            made.append(_first(read[task]) if len(modules) == 1 and None not in modules else None)
        pin = made[task] or _first(read[task])
        if pin is not None and pin.pattern >= 0:
            found[task] = pin
    return found


def _first(read: Sequence[ByWeight | None]) -> ByWeight | None:
    """The one whose pattern comes first; one without a pattern if there is no other."""
    pins = [one for one in read if one is not None]
    return min(pins, key=lambda one: (one.pattern < 0, one.pattern), default=None)
