"""Devices allowed for each colocation group by kernels, pins and exclusions."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.graph.members import parts_of
from devplace.graph.patterns import cut_by, deciding, matches, names
from devplace.problem.device_names import resolve_device
from devplace.problem.homes import keep_homes
from devplace.problem.weight_pins import ByWeight, pins_by_weight

if TYPE_CHECKING:
    from devplace.problem.problem import Problem


class Demands(NamedTuple):
    """What groups may do.

    Attributes:
        allowed: Devices each colocation group may go to. bool, shape `[G, D]`.
        notes: What was softened or changes nothing.
        pinned: Groups that a pin or a home keeps where they are.
    """

    allowed: NDArray[np.bool_]
    notes: tuple[str, ...]
    pinned: frozenset[int]


def demands_of(problem: Problem) -> Demands:
    """What kernels, pins and excluded devices leave.

    Raises:
        ProblemError: They contradict each other, or an op has no device left.
    """
    machine, tasks = problem.machine, problem.core.tasks
    usable = np.zeros(len(machine.devices), bool)
    usable[list(problem.usable_devices)] = True
    allowed = np.tile(usable, (tasks.num_groups, 1))
    _apply_support(problem, allowed)
    notes, pinned = _apply_pins(problem, allowed)
    kept = keep_homes(problem, allowed) if problem.homes else set()
    return Demands(allowed, notes, pinned | kept)


def _apply_support(problem: Problem, allowed: NDArray[np.bool_]) -> None:
    tasks = problem.core.tasks
    tasks_of: dict[str, list[int]] = {}
    for task, op_index in enumerate(tasks.task_op):
        for target in problem.graph.ops[op_index].targets:
            tasks_of.setdefault(target, []).append(task)
    for index, device in enumerate(problem.machine.devices):
        for target, found in tasks_of.items():
            if any(fnmatch.fnmatchcase(target, p) for p in device.unsupported_ops):
                allowed[tasks.group[found], index] = False
    stuck = np.flatnonzero(~allowed.any(axis=1))
    if len(stuck):
        op = problem.graph.ops[tasks.task_op[np.flatnonzero(tasks.group == stuck[0])[0]]]
        raise ProblemError(
            f"Every op needs a device that can run it: {op.name!r} ({op.target}) has none among "
            f"the usable ones. Allow another device or machine."
        )


def _apply_pins(
    problem: Problem, allowed: NDArray[np.bool_]
) -> tuple[tuple[str, ...], frozenset[int]]:
    graph, machine, tasks = problem.graph, problem.machine, problem.core.tasks
    pinned_by: dict[int, tuple[str, int]] = {}
    used: set[str] = set()
    notes: list[str] = []
    targets: dict[str, int] = {
        pattern: machine.device_index[resolve_device(machine, name, f"pin {pattern!r}")]
        for pattern, name in problem.pins.items()
    }
    for wanted, target in targets.items():
        if target not in problem.usable_devices:
            raise ProblemError(
                f"A pin must name a usable device: {wanted!r} is pinned to "
                f"{machine.device_names[target]}, which "
                f"{problem.unused[machine.device_names[target]]}. Change one of them."
            )
    _refuse_cuts(problem, targets)
    by_weight = pins_by_weight(graph, tasks, list(targets)) if targets else {}
    direct, through = _pinned_tasks(problem, list(targets), by_weight)
    for task, pattern in (*direct.items(), *through.items()):
        op, group = graph.ops[tasks.task_op[task]], int(tasks.group[task])
        if task in through and group in pinned_by:
            continue  # what a pin names itself decides
        used.update([pattern, *(p for p, _ in deciding(op, targets) if p is not None)])
        device = targets[pattern]
        previous = pinned_by.setdefault(group, (pattern, device))
        if previous[1] != device:
            raise ProblemError(
                f"Pins must not part what belongs together: {op.name!r} is pinned to "
                f"{machine.device_names[device]} by {pattern!r}, but its colocation group to "
                f"{machine.device_names[previous[1]]} by {previous[0]!r}. Change one of them."
            )
        if allowed[group, device]:
            allowed[group] = False
            allowed[group, device] = True
        elif problem.soft_pins:
            notes.append(
                f"pin {pattern!r} dropped for {op.name!r}: {op.target} cannot run on "
                f"{machine.device_names[device]}"
            )
        else:
            raise ProblemError(
                f"A pin must name a device that can run the op: {op.name!r} ({op.target}) cannot "
                f"run on {machine.device_names[device]}. Remove pin {pattern!r} or allow soft pins."
            )
    notes += [_unused_pin(problem, pattern, targets) for pattern in targets if pattern not in used]
    pinned = frozenset(g for g, (_, device) in pinned_by.items() if allowed[g, device])
    return tuple(dict.fromkeys(notes)), pinned


def _pinned_tasks(
    problem: Problem, patterns: Sequence[str], by_weight: Mapping[int, ByWeight]
) -> tuple[dict[int, str], dict[int, str]]:
    """Tasks that pins name, and those that they reach through weights, with the pattern of each.

    An op that is called from a module above that of its weight counts as called from the latter.
    """
    graph, tasks = problem.graph, problem.core.tasks
    direct: dict[int, str] = {}
    through: dict[int, str] = {}
    for task, op_index in enumerate(tasks.task_op if patterns else ()):
        op, pin = graph.ops[op_index], by_weight.get(task)
        first = next((k for k, pattern in enumerate(patterns) if matches(pattern, op)), None)
        is_above = pin is not None and not op.members and _is_above(op.module, pin.module)
        if pin is not None and (first is None or (is_above and pin.pattern < first)):
            through[task] = patterns[pin.pattern]
        elif first is not None:
            direct[task] = patterns[first]
    return direct, through


def _is_above(module: str, other: str) -> bool:
    return module != other and (not module or other.startswith(f"{module}."))


def _refuse_cuts(problem: Problem, targets: Mapping[str, int]) -> None:
    """Refuse pins that part the members of a fused group."""
    for op in problem.graph.ops:
        cut = cut_by(op, targets)
        if cut is None:
            continue
        inside, outside = (f"{m.name!r} (module {m.module!r})" for m in (cut.inside, cut.outside))
        away = ""
        if cut.other is not None:
            away = f", which {cut.other!r} sends to {problem.pins[cut.other]}"
        raise ProblemError(
            f"A pin must not cut a fused group: {cut.pattern!r} sends {inside} to "
            f"{problem.pins[cut.pattern]}, but its group {op.name!r} also computes "
            f"{outside}{away}. Fuse with these pins, then price that graph: "
            f"graph = fuse_for(graph, pins), of devplace.graph.fusion."
        )


def _unused_pin(problem: Problem, pattern: str, targets: Mapping[str, int]) -> str:
    """Why a pin binds no task: a note if that is harmless, else an error."""
    graph, tasks = problem.graph, problem.core.tasks
    matched = [index for index, op in enumerate(graph.ops) if matches(pattern, op)]
    parts = [part for op in graph.ops for part in parts_of(op)]
    if not matched and not any(names(pattern, part) for part in parts):
        modules = sorted({part.module.split(".")[0] for part in parts if part.module})
        raise ProblemError(
            f"Every pin must match something: {pattern!r} matches no module or op. "
            f"Top-level modules: {', '.join(modules[:20]) or 'none'}."
        )
    own = set(tasks.task_op.tolist())
    hidden = next((index for index in matched if index in own), None)
    if hidden is None:
        return f"pin {pattern!r} changes nothing: what it matches follows the ops it belongs to"
    winner = next(other for other in targets if matches(other, graph.ops[hidden]))
    raise ProblemError(
        f"Every pin must decide something: {pattern!r} comes after {winner!r}, which matches all "
        f"of it. Put {pattern!r} first."
    )
