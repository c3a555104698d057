"""What of a graph is work, what travels, and what takes memory; by names' indices, in plain lists.

From the rules in the docs: a view costs nothing and lies in its base's memory; a view of the whole
travels as its base, one of a part by itself; a source that the step only reads is wherever it is
read, a replaced one is work that is done at the start.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devplace.graph import Member, Op, OpGraph
from devplace.graph.overwrite import overwritten_sources
from devplace.machine import Device, Machine
from devplace.units import parse_size

if TYPE_CHECKING:
    from devplace.problem import Problem


@dataclass(frozen=True)
class Facts:
    """What has to be done.

    Attributes:
        work: Ops that run, and sources that are replaced, in graph order.
        reads: Work op -> tensors it waits for, as they travel.
        sends: Work op -> tensors it makes that others read, as they travel, by tensor id.
        readers: Tensor -> work ops that read it, in graph order.
        owned: Work op -> tensors whose memory it takes.
        memory_of: Tensor that travels -> tensor whose memory it lies in.
        owner: Tensor -> op whose memory it lies in.
        kept: Tensors whose memory stays to the end (results).
        over: Tensor -> tensor of the source that it may be computed over.
        constants: Read-only source -> work ops that read it.
    """

    work: list[int]
    reads: dict[int, list[int]]
    sends: dict[int, list[int]]
    readers: dict[int, list[int]]
    owned: dict[int, list[int]]
    memory_of: dict[int, int]
    owner: list[int]
    kept: set[int]
    over: dict[int, int]
    constants: dict[int, set[int]]


def facts(graph: OpGraph) -> Facts:
    """Read them off a graph."""
    size = [tensor.num_bytes for tensor in graph.tensors]
    travels_as, memory, owner = _bases(graph, size)
    replaced = {result.replaces for result in graph.results if result.replaces >= 0}
    work = [
        v
        for v, op in enumerate(graph.ops)
        if not op.is_view and (not op.is_source or v in replaced)
    ]
    is_work = set(work)
    reads: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    constants: dict[int, set[int]] = {
        v: set() for v, op in enumerate(graph.ops) if op.is_source and v not in replaced
    }
    for v in work:
        reads[v] = []
        for tensor in dict.fromkeys(travels_as[t] for t in graph.ops[v].inputs):
            if owner[tensor] in is_work:
                reads[v].append(tensor)
                readers.setdefault(tensor, []).append(v)
            else:
                constants[owner[tensor]].add(v)
    sends: dict[int, list[int]] = {v: [] for v in work}
    for tensor in sorted(readers):
        sends[owner[tensor]].append(tensor)
    owned = {v: [t for t in graph.ops[v].outputs if memory[t] == t] for v in work}
    over = {}
    for tensor, source in overwritten_sources(graph).items():
        old = graph.ops[source].outputs[0]
        if old in graph.ops[graph.producer[tensor]].inputs:
            over[tensor] = old
    return Facts(
        work,
        reads,
        sends,
        readers,
        owned,
        {tensor: memory[tensor] for tensor in readers},
        owner,
        {memory[result.tensor] for result in graph.results},
        over,
        constants,
    )


def _bases(graph: OpGraph, size: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """For each tensor: as what it travels, in whose memory it lies, and which op owns that."""
    travels_as, memory = list(range(len(size))), list(range(len(size)))
    owner = list(graph.producer)
    for op in graph.ops:
        for tensor in op.outputs if op.is_view else ():
            base = op.alias_of
            memory[tensor], owner[tensor] = memory[base], owner[base]
            if size[tensor] >= size[travels_as[base]]:
                travels_as[tensor] = travels_as[base]
    return travels_as, memory, owner


def together(graph: OpGraph) -> list[set[int]]:
    """Ops that must share a device: a replaced source, the optimizer state of the same parameter,
    and the ops that make their new values."""
    owner = _bases(graph, [tensor.num_bytes for tensor in graph.tensors])[2]
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
    with the op can run there."""
    graph, machine = problem.graph, problem.machine
    broken = []
    for v in work if problem.pins else ():
        op = graph.ops[v]
        pattern = next((p for p in problem.pins if _is_pinned_by(p, op)), None)
        if pattern is None:
            continue
        place = machine.devices[machine.device_index[meant_device(machine, problem.pins[pattern])]]
        beside = _all_beside(v, groups) if problem.soft_pins else set()
        if machine.devices[device[v]] != place and all(
            _can_run(place, graph.ops[u]) for u in beside
        ):
            broken.append(f"{op.name!r} is not on {place.name}, where pin {pattern!r} wants it")
    return broken


def _is_pinned_by(pattern: str, op: Op) -> bool:
    """By name, module, or a module above it; of a fused op by those of any member that is
    computed for it alone."""
    bound = (one for one in op.members if not one.is_view and not one.is_repeated)
    named: tuple[Op | Member, ...] = (op, *bound)
    for one in named:
        parts = one.module.split(".") if one.module else []
        paths = [".".join(parts[: n + 1]) for n in range(len(parts))]
        if not pattern or any(fnmatch.fnmatchcase(name, pattern) for name in (one.name, *paths)):
            return True
    return False


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
