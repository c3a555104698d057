"""When a new parameter or state value may overwrite the old one."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from devplace.graph.overwrite import OUT_FORMS, overwritten_sources
from devplace.run.schedule import Instruction, NodeFacts, Schedule


class WriteBack(NamedTuple):
    """A result that takes the place of a source of its device.

    Attributes:
        result: Index into `graph.results`.
        source: The source op it replaces.
        node: FX node of the new value.
        may_stand_in: Whether the old value's memory, once overwritten, may serve for the new value.
        is_in_place: Whether its op may write straight into the old value's memory; not of fused
            ops, which `DeviceWrites.fused` is about.
        pushes: Transfers that send the old value; they must have left before it is overwritten.
    """

    result: int
    source: int
    node: Any
    may_stand_in: bool
    is_in_place: bool
    pushes: tuple[int, ...]


class Scratch(NamedTuple):
    """A value that can lie in the memory of a source between its last reader and its new value.

    Attributes:
        source: The source op.
        node: FX node of the value.
        pushes: As of `WriteBack`.
    """

    source: int
    node: Any
    pushes: tuple[int, ...]


class Over(NamedTuple):
    """An output of a fused op that is written over one of its inputs.

    Attributes:
        output: Its place among the outputs.
        input: Place of the source's value among the inputs.
        pushes: As of `WriteBack`.
    """

    output: int
    input: int
    pushes: tuple[int, ...]


@dataclass(frozen=True)
class DeviceWrites:
    """The write-backs of one device.

    Attributes:
        after: Instruction -> write-backs that may happen right after it: the new value is there,
            and nothing on the device reads the old one any more.
        at_end: Those that must wait until the device has done everything.
        drops: Instruction -> nodes whose values nothing needs after it (and its write-backs).
        scratch: Instruction -> how its op may use the memory of a source it is the last to read.
        fused: Instruction of a fused op -> what it writes over its inputs, by output as the
            kernels that were compiled beforehand.
    """

    after: Mapping[int, tuple[WriteBack, ...]] = field(default_factory=dict)
    at_end: tuple[WriteBack, ...] = ()
    drops: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    scratch: Mapping[int, Scratch] = field(default_factory=dict)
    fused: Mapping[int, tuple[Over, ...]] = field(default_factory=dict)

    def in_place(self, index: int) -> WriteBack | Scratch | None:
        """How the op of an instruction may write into the memory of a source."""
        writes = (write for write in self.after.get(index, ()) if write.is_in_place)
        return next(writes, self.scratch.get(index))


def write_backs(schedule: Schedule) -> tuple[DeviceWrites, ...]:
    """Write-backs of every device.

    Complexity: O(I + E) for I instructions with E arguments.
    """
    facts = NodeFacts(schedule.graph, schedule.device_of_op)
    over = overwritten_sources(schedule.graph)
    return tuple(_of_device(schedule, facts, over, d) for d in range(len(schedule.instructions)))


def out_overload(target: Any) -> Any | None:
    """The overload of an elementwise op that writes into a given tensor, or None.

    These ops read each element before they write it, and compute it alike in both forms; so the
    output may be an input, if both are laid out alike.
    """
    return _out_overloads().get(target)


@cache
def _out_overloads() -> dict[Any, Any]:
    found = {}
    for name, out in OUT_FORMS.items():
        _, packet, overload = name.split(".")
        op = getattr(torch.ops.aten, packet)
        found[getattr(op, overload)] = getattr(op, out)
    return found


class _Reads:
    """What a device does with each value, and with the memory of each source."""

    def __init__(self, facts: NodeFacts, instructions: tuple[Instruction, ...]) -> None:
        self.made: dict[Any, int] = {}
        self.last_use: dict[Any, int] = {}
        self.last_read: dict[int, int] = {}
        self.last_use_of_root: dict[int, int] = {}
        self.pushes: dict[int, list[int]] = {}
        for index, (kind, node, transfer) in enumerate(instructions):
            self.last_use[node] = index
            self.last_use_of_root[facts.root(node)] = index
            if kind == "send":
                self._read(facts, node, index)
                self.pushes.setdefault(facts.root(node), []).append(transfer)
                continue
            if kind == "call":
                self.made[node] = index
                for arg in node.all_input_nodes:
                    self.last_use[arg] = index
                    self.last_use_of_root[facts.root(arg)] = index
                    self._read(facts, arg, index)

    def _read(self, facts: NodeFacts, node: Any, index: int) -> None:
        root = facts.root(node)
        if facts.graph.ops[root].is_source:
            self.last_read[root] = index


def _of_device(
    schedule: Schedule, facts: NodeFacts, over: Mapping[int, int], device: int
) -> DeviceWrites:
    graph, results = schedule.graph, schedule.results[device]
    reads = _Reads(facts, schedule.instructions[device])
    wanted_at_end = {facts.root(node) for _, node in results}
    kept = {node for index, node in results if graph.results[index].replaces < 0}
    handed_out = {facts.root(node) for node in kept}
    after: dict[int, list[WriteBack]] = {}
    at_end: list[WriteBack] = []
    used: dict[Any, int] = {}
    fused: dict[int, list[Over]] = {}
    for index, node in results:
        source = graph.results[index].replaces
        if source < 0:
            continue
        made = reads.made.get(node)
        pushes = tuple(reads.pushes.get(source, ()))
        is_borrowed = graph.ops[facts.root(node)].is_source
        if made is None or is_borrowed or source in wanted_at_end:
            at_end.append(WriteBack(index, source, node, False, False, pushes))
            kept.add(node)
            continue
        when = max(made, reads.last_read.get(source, -1))
        stands_in = not facts.is_view(node) and facts.root(node) not in handed_out
        is_able = stands_in and over.get(facts.tensor_id(node)) == source
        is_fused = bool(graph.ops[facts.op_of[node]].members)
        in_place = is_able and not is_fused and when == made
        write = WriteBack(index, source, node, stands_in, in_place, pushes)
        if is_able and is_fused:
            _write_over(reads, facts, write, fused)
        after.setdefault(when, []).append(write)
        used[node] = max(used.get(node, -1), when, reads.last_use[node])
    drops: dict[int, list[Any]] = {}
    for node, index in used.items():
        if node not in kept:
            drops.setdefault(index, []).append(node)
    return DeviceWrites(
        {index: tuple(writes) for index, writes in after.items()},
        tuple(at_end),
        {index: tuple(nodes) for index, nodes in drops.items()},
        _scratches(schedule, facts, reads, device, after),
        {index: tuple(sorted(found)) for index, found in fused.items()},
    )


def _write_over(
    reads: _Reads, facts: NodeFacts, write: WriteBack, fused: dict[int, list[Over]]
) -> None:
    """Let a fused op write over a source, if nothing reads that after it."""
    is_part = write.node.target is operator.getitem
    call, output = write.node.args if is_part else (write.node, 0)
    made = reads.made[call]
    if reads.last_read.get(write.source, -1) <= made:
        place = next(k for k, arg in enumerate(call.args) if facts.op_of[arg] == write.source)
        fused.setdefault(made, []).append(Over(output, place, write.pushes))


def _scratches(
    schedule: Schedule,
    facts: NodeFacts,
    reads: _Reads,
    device: int,
    after: Mapping[int, list[WriteBack]],
) -> dict[int, Scratch]:
    """Such as a moment estimate times its decay, to which the new gradient is added then."""
    held = {facts.root(node) for _, node in schedule.results[device]}
    found: dict[int, Scratch] = {}
    for write in (write for writes in after.values() for write in writes):
        index = reads.last_read.get(write.source, -1)
        made = reads.made[write.node]
        if index < 0 or index >= made:
            continue
        kind, node, _ = schedule.instructions[device][index]
        is_last = kind == "call" and reads.last_use_of_root[facts.root(node)] <= made
        if is_last and facts.root(node) not in held and _fits(facts, node, write.source):
            found.setdefault(index, Scratch(write.source, node, write.pushes))
    return found


def _fits(facts: NodeFacts, node: Any, source: int) -> bool:
    """Whether an elementwise op reads the whole of a source and gives a value like it."""
    old = facts.graph.ops[source].outputs[0]
    if facts.is_view(node) or facts.graph.ops[facts.op_of[node]].target not in OUT_FORMS:
        return False
    read = {facts.tensor_id(arg) for arg in node.all_input_nodes if facts.root(arg) == source}
    now, then = facts.graph.tensors[facts.tensor_id(node)], facts.graph.tensors[old]
    return read == {old} and (now.shape, now.dtype) == (then.shape, then.dtype)
