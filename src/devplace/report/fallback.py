"""Ops that ended up on a slower device than the fastest one, why, and what it costs."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from devplace.graph import Op
from devplace.graph.members import calls_text, where_text
from devplace.simulator import Timeline
from devplace.units import NS_PER_MS

I64 = NDArray[np.int64]
Reason = Literal["no kernel", "pinned", "memory", "faster there", "placer"]
_SLOWER = 1.05
_NAMED = 3


class Fallback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ops on one slower device for one reason.

    Attributes:
        device: Where they run.
        fastest: Where they would run faster.
        reason: `no kernel`: the fastest device cannot run them, or what must sit with them.
            `pinned`: a pin says so. `memory`: they do not fit there beside what is there.
            `faster there`: the step is shorter so, as the fastest device has other work.
            `placer`: the placer chose so, though the plan is no faster than one device.
        ops: Names of the ops, the costliest first.
        cost_ns: Time they take more than on the fastest device.
        text: All of this as a sentence.
    """

    device: str
    fastest: str
    reason: Reason
    ops: tuple[str, ...]
    cost_ns: int
    text: str

    @property
    def is_normal(self) -> bool:
        """Whether the ops are there to share the work, which makes the step shorter."""
        return self.reason == "faster there"


def fallbacks(timeline: Timeline, single_ns: int) -> tuple[Fallback, ...]:
    """Ops that take longer where they are than on the fastest usable device, grouped.

    Only devices count that are slower for the step as a whole; between equal ones nothing falls
    back. The costliest group comes first.

    Args:
        timeline: The step.
        single_ns: Best step on one device.
    """
    problem, tasks = timeline.problem, timeline.problem.core.tasks
    duration = problem.core.wires.duration_ns
    names = problem.machine.device_names
    total = duration.sum(axis=0)
    fastest = min(problem.usable_devices, key=lambda d: (total[d], d))
    device = timeline.task_devices
    loss = duration[np.arange(len(device)), device] - duration[:, fastest]
    is_slower = (total > _SLOWER * total[fastest])[device] & (loss > 0)
    why = _Why(timeline, fastest, timeline.makespan_ns < single_ns)
    found: dict[tuple[int, Reason], list[int]] = defaultdict(list)
    for task in np.flatnonzero(is_slower).tolist():
        found[int(device[task]), why.reason(task)].append(task)
    rows = []
    for (d, reason), members in found.items():
        members.sort(key=lambda task: (-int(loss[task]), task))
        ops = tuple(problem.graph.ops[tasks.task_op[task]].name for task in members)
        cost = int(loss[members].sum())
        text = _text(timeline, members, names[d], names[fastest], reason, cost)
        rows.append(Fallback(names[d], names[fastest], reason, ops, cost, text))
    return tuple(sorted(rows, key=lambda row: (-row.cost_ns, row.device, row.reason)))


class _Why:
    """Why a task is not on the fastest device."""

    def __init__(self, timeline: Timeline, fastest: int, is_gain: bool) -> None:
        problem = self._problem = timeline.problem
        self._fastest = fastest
        self._free: Reason = "faster there" if is_gain else "placer"
        self._room = problem.limit_bytes[fastest] - int(timeline.peak_bytes[fastest])
        patterns = problem.machine.devices[fastest].unsupported_ops
        tasks = self._tasks = problem.core.tasks
        self._stuck: set[int] = set()
        for task, index in enumerate(tasks.task_op.tolist()) if patterns else ():
            if _is_unsupported(problem.graph.ops[index], patterns):
                self._stuck.add(int(tasks.group[task]))
        self._group_bytes = _group_bytes(timeline)

    def reason(self, task: int) -> Reason:
        """Why this task is not on the fastest device."""
        group = int(self._tasks.group[task])
        if group in self._stuck:
            return "no kernel"
        if not self._problem.allowed[group, self._fastest] and group in self._problem.pinned_groups:
            return "pinned"
        return "memory" if self._group_bytes[group] > self._room else self._free


def _is_unsupported(op: Op, patterns: Sequence[str]) -> bool:
    """Whether a device lacks a kernel for an op, or for a member of a fused one."""
    return any(fnmatch.fnmatchcase(call, pattern) for call in op.targets for pattern in patterns)


def _group_bytes(timeline: Timeline) -> I64:
    """Bytes all storages of each colocation group take, with the largest workspace. `[G]`"""
    tasks = timeline.problem.core.tasks
    total: I64 = timeline.problem.spaces.groups_sum(tasks.made_bytes)
    space = np.zeros(tasks.num_groups, np.int64)
    np.maximum.at(space, tasks.group, tasks.workspace_bytes)
    return total + space


def _text(
    timeline: Timeline, members: list[int], device: str, fastest: str, reason: Reason, cost: int
) -> str:
    graph, tasks = timeline.problem.graph, timeline.problem.core.tasks
    shown = []
    for task in members[:_NAMED]:
        op = graph.ops[tasks.task_op[task]]
        where = f" in {where_text(op)}" if where_text(op) else ""
        shown.append(f"{op.name} ({calls_text(op)}{where})")
    more = f" and {len(members) - _NAMED:,} more" if len(members) > _NAMED else ""
    verb = "run" if len(members) > 1 else "runs"
    because = _because(timeline, members, fastest, reason)
    cost_ms = cost / NS_PER_MS
    costs = f"{cost_ms:.3g}" if cost_ms < 100 else f"{cost_ms:,.0f}"
    return (
        f"{', '.join(shown)}{more} {verb} on {device}, not on {fastest}: {because}; "
        f"costs {costs} ms"
    )


def _because(timeline: Timeline, members: list[int], fastest: str, reason: Reason) -> str:
    graph, tasks = timeline.problem.graph, timeline.problem.core.tasks
    index = timeline.problem.machine.device_index[fastest]
    patterns = timeline.problem.machine.devices[index].unsupported_ops
    is_all = all(_is_unsupported(graph.ops[tasks.task_op[task]], patterns) for task in members)
    them, they_do = ("them", "they do") if len(members) > 1 else ("it", "it does")
    company = "" if is_all else f", or for what must sit with {them}"
    share = f"{int(timeline.busy_ns[index]) / max(1, timeline.makespan_ns):.0%} of"
    return {
        "no kernel": f"{fastest} has no kernel for {them}{company}",
        "pinned": f"a pin puts {them} there",
        "memory": f"{they_do} not fit on {fastest} beside what is there",
        "faster there": f"to shorten the step, while {fastest} is busy {share} it",
        "placer": f"the placer chose so, while {fastest} is busy {share} the step",
    }[reason]
