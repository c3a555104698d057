"""When a new parameter or state value may overwrite the old one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from devplace.graph import OpGraph
from devplace.graph.overwrite import OUT_FORMS, overwritten_sources
from devplace.schedule.schedule import Schedule, by_last_use


class WriteBack(NamedTuple):
    """A result that takes the place of a source of its device.

    Attributes:
        result: Index into `graph.results`.
        source: The source op it replaces.
        tensor: The new value.
        may_stand_in: Whether the old value's memory, once overwritten, may serve for the new value.
        is_in_place: Whether its op may write straight into the old value's memory; not of fused
            ops, which `DeviceWrites.fused` is about.
        pushes: Transfers that send the old value; they must have left before it is overwritten.
    """

    result: int
    source: int
    tensor: int
    may_stand_in: bool
    is_in_place: bool
    pushes: tuple[int, ...]


class Scratch(NamedTuple):
    """A value that can lie in the memory of a source between its last reader and its new value.

    Attributes:
        source: The source op.
        tensor: The value.
        pushes: As of `WriteBack`.
    """

    source: int
    tensor: int
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
        drops: Instruction -> new values that nothing needs after it and its write-backs.
        dead: Instruction -> other tensors that nothing on the device needs after it.
        scratch: Instruction -> how its op may use the memory of a source it is the last to read.
        fused: Instruction of a fused op -> what it writes over its inputs, by output as the
            kernels that were compiled beforehand.
    """

    after: Mapping[int, tuple[WriteBack, ...]] = field(default_factory=dict)
    at_end: tuple[WriteBack, ...] = ()
    drops: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    dead: Mapping[int, list[int]] = field(default_factory=dict)
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
    over = overwritten_sources(schedule.graph)
    return tuple(_of_device(schedule, over, d) for d in range(len(schedule.instructions)))


class _Reads:
    """What a device does with each tensor, and with the memory of each source."""

    def __init__(self, schedule: Schedule, device: int) -> None:
        graph = schedule.graph
        storage, producer, replaced = graph.storage, graph.producer, graph.replaced
        self.made: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.last_read: dict[int, int] = {}
        self.pushes: dict[int, list[int]] = {}
        for index, (kind, what, transfer) in enumerate(schedule.instructions[device]):
            read: tuple[int, ...] = ()
            if kind == "call":
                read = graph.ops[what].inputs
                for tensor in graph.ops[what].outputs:
                    self.made[tensor] = self.last_use[tensor] = index
            elif kind == "send":
                read = (what,)
            else:
                self.last_use[what] = index
            for tensor in read:
                self.last_use[tensor] = index
                owner = producer[storage[tensor]]
                if owner in replaced:
                    self.last_read[owner] = index
                    if kind == "send":
                        self.pushes.setdefault(owner, []).append(transfer)
        self.last_use_of_storage: dict[int, int] = {}
        for tensor, index in self.last_use.items():
            memory = storage[tensor]
            self.last_use_of_storage[memory] = max(index, self.last_use_of_storage.get(memory, -1))


def _of_device(schedule: Schedule, over: Mapping[int, int], device: int) -> DeviceWrites:
    graph, results = schedule.graph, schedule.results[device]
    storage, producer = graph.storage, graph.producer
    reads = _Reads(schedule, device)
    wanted_at_end = {storage[tensor] for _, tensor in results}
    kept = {tensor for index, tensor in results if graph.results[index].replaces < 0}
    handed_out = {storage[tensor] for tensor in kept}
    after: dict[int, list[WriteBack]] = {}
    at_end: list[WriteBack] = []
    used: dict[int, int] = {}
    fused: dict[int, list[Over]] = {}
    for index, tensor in results:
        source = graph.results[index].replaces
        if source < 0:
            continue
        old = graph.ops[source].outputs[0]
        made, maker = reads.made.get(tensor), graph.ops[producer[tensor]]
        pushes = tuple(reads.pushes.get(source, ()))
        is_borrowed = graph.ops[producer[storage[tensor]]].is_source
        if made is None or is_borrowed or old in wanted_at_end:
            at_end.append(WriteBack(index, source, tensor, False, False, pushes))
            kept.add(tensor)
            continue
        last_read = reads.last_read.get(source, -1)
        when = max(made, last_read)
        stands_in = not maker.is_view and storage[tensor] not in handed_out
        is_able = stands_in and over.get(tensor) == source and last_read <= made
        in_place = is_able and not maker.members
        write = WriteBack(index, source, tensor, stands_in, in_place, pushes)
        if is_able and maker.members:
            place = maker.outputs.index(tensor), maker.inputs.index(old)
            fused.setdefault(made, []).append(Over(*place, pushes))
        after.setdefault(when, []).append(write)
        used[tensor] = max(used.get(tensor, -1), when, reads.last_use[tensor])
    drops: dict[int, list[int]] = {}
    for tensor, index in used.items():
        if tensor not in kept:
            drops.setdefault(index, []).append(tensor)
    return DeviceWrites(
        {index: tuple(writes) for index, writes in after.items()},
        tuple(at_end),
        {index: tuple(tensors) for index, tensors in drops.items()},
        by_last_use(reads.last_use, results),
        _scratches(schedule, reads, device, after),
        {index: tuple(sorted(found)) for index, found in fused.items()},
    )


def _scratches(
    schedule: Schedule, reads: _Reads, device: int, after: Mapping[int, list[WriteBack]]
) -> dict[int, Scratch]:
    """Such as a moment estimate times its decay, to which the new gradient is added then."""
    graph = schedule.graph
    held = {graph.storage[tensor] for _, tensor in schedule.results[device]}
    found: dict[int, Scratch] = {}
    for write in (write for writes in after.values() for write in writes):
        index = reads.last_read.get(write.source, -1)
        made = reads.made[write.tensor]
        if index < 0 or index >= made:
            continue
        kind, op, _ = schedule.instructions[device][index]
        if kind != "call" or not _fits(graph, op, write.source):
            continue
        (tensor,) = graph.ops[op].outputs
        if reads.last_use_of_storage[tensor] <= made and tensor not in held:
            found.setdefault(index, Scratch(write.source, tensor, write.pushes))
    return found


def _fits(graph: OpGraph, index: int, source: int) -> bool:
    """Whether an elementwise op reads the whole of a source and gives a value like it."""
    op, old = graph.ops[index], graph.ops[source].outputs[0]
    if op.is_view or op.target not in OUT_FORMS or len(op.outputs) != 1:
        return False
    read = {tensor for tensor in op.inputs if graph.storage[tensor] == old}
    now, then = graph.tensors[op.outputs[0]], graph.tensors[old]
    return read == {old} and (now.shape, now.dtype) == (then.shape, then.dtype)
