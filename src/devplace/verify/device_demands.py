"""Check the demands of a problem: which device each op may be on."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from devplace.graph import Member, Op, OpGraph
from devplace.machine import Device, Machine
from devplace.units import parse_size
from devplace.verify.facts import bases, facts

if TYPE_CHECKING:
    from devplace.problem import Problem


def together(graph: OpGraph) -> list[set[int]]:
    """Ops that must share a device: a replaced source, the optimizer state of the same parameter,
    and the ops that make their new values."""
    owner = bases(graph, [tensor.num_bytes for tensor in graph.tensors])[2]
    groups: list[set[int]] = []
    homes: dict[str, int] = {}
    for result in graph.results:
        if result.replaces < 0:
            continue
        source = graph.ops[result.replaces]
        group = {result.replaces, owner[result.tensor]}
        if source.role in ("parameter", "state"):
            slot, bracket, rest = source.name.partition("[")
            name = rest.removesuffix("]") if source.role == "state" and bracket else ""
            group.add(homes.setdefault(name or source.name, result.replaces))
            del slot
        groups.append(group)
    return groups


def broken_demands(problem: Problem, device: Sequence[int]) -> list[str]:
    """Demands that a placement breaks: devices, co-location, unsupported ops, excluded devices,
    pins."""
    graph, machine = problem.graph, problem.machine
    if len(device) != len(graph.ops):
        return [f"{len(device)} devices are given for {len(graph.ops)} ops"]
    for v, d in enumerate(device):
        if not 0 <= d < len(machine.devices):
            return [f"{graph.ops[v].name!r} is on device {d} of {len(machine.devices)}"]
    found = facts(graph)
    work = set(found.work)
    excluded = {meant_device(machine, name) for name in problem.exclude}
    empty = [name for name, most in problem.limits.items() if parse_size(most) == 0]
    excluded |= {meant_device(machine, name) for name in empty}
    broken = []
    for v in found.work:
        place = machine.devices[device[v]]
        if place.name in excluded:
            broken.append(f"{graph.ops[v].name!r} is on {place.name}, which is excluded")
        if not _can_run(place, graph.ops[v]):
            broken.append(f"{graph.ops[v].name!r} is on {place.name}, which cannot run it")
    groups = [group & work for group in together(graph)]
    for group in groups:
        if len({device[v] for v in group}) > 1:
            names = sorted(graph.ops[v].name for v in group)
            broken.append(f"{', '.join(names)} must share a device")
    return broken + _unpinned(problem, device, found.work, groups)


def _unpinned(
    problem: Problem, device: Sequence[int], work: Sequence[int], groups: Sequence[set[int]]
) -> list[str]:
    """Ops that are not where a pin wants them; soft pins only where all that must share a device
    with the op can run there, pins of weights only where no pin names any of these."""
    graph, machine = problem.graph, problem.machine
    wanted = _wanted(graph, list(problem.pins)) if problem.pins else {}
    broken = []
    for v in work:
        if v not in wanted:
            continue
        pattern, is_named = wanted[v]
        place = machine.devices[machine.device_index[meant_device(machine, problem.pins[pattern])]]
        beside = _all_beside(v, groups) if problem.soft_pins or not is_named else set()
        if not is_named and any(u in wanted and wanted[u][1] for u in beside):
            continue
        can_go = not problem.soft_pins or all(_can_run(place, graph.ops[u]) for u in beside)
        if machine.devices[device[v]] != place and can_go:
            name = graph.ops[v].name
            broken.append(f"{name!r} is not on {place.name}, where pin {pattern!r} wants it")
    return broken


def _wanted(graph: OpGraph, patterns: Sequence[str]) -> dict[int, tuple[str, bool]]:
    """Op -> the pin that decides where it is, and whether that names the op itself."""
    weights = _weights(graph, patterns)
    found = {}
    for v, op in enumerate(graph.ops):
        direct = next((k for k, p in enumerate(patterns) if _is_pinned_by(p, op)), None)
        read = [weights[graph.producer[t]] for t in op.inputs]
        reached = [w for w in ([weights[v]] if weights[v] else read) if w and w.pin < len(patterns)]
        weight = min(reached, key=lambda w: w.pin, default=None)
        if weight is not None and (
            direct is None
            or (weight.pin < direct and not op.members and _is_above(op.module, weight.module))
        ):
            found[v] = patterns[weight.pin], False
        elif direct is not None:
            found[v] = patterns[direct], True
    return found


class _Weight(NamedTuple):
    """A parameter, or what is computed of parameters of one module alone.

    Attributes:
        module: Of the parameter.
        pin: Place of the first pattern that names it by any of its names; the number of patterns if
            none does.
    """

    module: str
    pin: int


def _weights(graph: OpGraph, patterns: Sequence[str]) -> list[_Weight | None]:
    """What each op makes, if that is a weight."""
    found: list[_Weight | None] = []
    for op in graph.ops:
        read = [found[graph.producer[t]] for t in op.inputs]
        modules = {weight.module for weight in read if weight}
        if op.role == "parameter":
            tied = [a for a, first in graph.meta.get("tied", {}).items() if first == op.name]
            own = [(op.name, op.module), *((a, a.rpartition(".")[0]) for a in tied)]
            hits = (
                (k, module)
                for k, p in enumerate(patterns)
                for name, module in own
                if _is_named(p, name, module)
            )
            pin, module = next(hits, (len(patterns), op.module))
            found.append(_Weight(module, pin))
        elif len(modules) == 1 and all(read):
            found.append(min((w for w in read if w), key=lambda w: w.pin))
        else:
            found.append(None)
    return found


def _is_above(module: str, other: str) -> bool:
    parts, longer = module.split("."), other.split(".")
    return module != other and (not module or longer[: len(parts)] == parts)


def _is_pinned_by(pattern: str, op: Op) -> bool:
    """By name, module, or a module above it; of a fused op by those of any member that is
    computed for it alone."""
    bound = (one for one in op.members if not one.is_view and not one.is_repeated)
    named: tuple[Op | Member, ...] = (op, *bound)
    return any(_is_named(pattern, one.name, one.module) for one in named)


def _is_named(pattern: str, name: str, module: str) -> bool:
    parts = module.split(".") if module else []
    paths = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return not pattern or any(fnmatch.fnmatchcase(one, pattern) for one in (name, *paths))


def _all_beside(v: int, groups: Sequence[set[int]]) -> set[int]:
    """What must share a device with an op, itself included."""
    found, grows = {v}, True
    while grows:
        near = set().union(*(group for group in groups if group & found))
        grows = not near <= found
        found |= near
    return found


def _can_run(place: Device, op: Op) -> bool:
    calls = [member.target for member in op.members if not member.is_view] or [op.target]
    return not any(
        fnmatch.fnmatchcase(call, pattern) for call in calls for pattern in place.unsupported_ops
    )


def meant_device(machine: Machine, name: str | int) -> str:
    """The device that a user means: by its name, by the number of a GPU, or `cuda` or `cpu` where
    there is one."""
    text = f"cuda:{name}" if str(name).isdigit() else str(name)
    named = [d for d in machine.device_names if text in (d, d.partition(":")[0])]
    return text if text in named else named[0]
