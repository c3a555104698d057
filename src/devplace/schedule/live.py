"""Which tensors of a step take memory on a GPU, instruction by instruction."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from devplace.graph import OpGraph
from devplace.schedule.heap import HeapBlock, HeapTally
from devplace.schedule.linear import PushJoins, lane_of
from devplace.schedule.schedule import Schedule
from devplace.schedule.write_back import DeviceWrites


class Change(NamedTuple):
    """What an instruction does to a device's memory.

    Attributes:
        joined: Tensors that are free before it, because pushes of them are over by then.
        op: The op that is called, or -1.
        taken: Tensors that it takes memory for.
        freed: Tensors that nothing needs after it.
    """

    joined: Sequence[int]
    op: int
    taken: Sequence[int]
    freed: Sequence[int]


def memory_changes(
    schedule: Schedule, device: int, writes: DeviceWrites, joins: PushJoins
) -> Iterator[Change]:
    """What every instruction takes and frees, workspaces of ops apart.

    Sources and receive buffers lie elsewhere, new values as `writes` says: in the memory of the
    source that they replace where they can be computed there, else there once they were copied.
    Views keep the memory of their base, pushes that of what they send until they are joined.

    Args:
        schedule: What every device does.
        device: Index of a GPU.
        writes: Its write-backs.
        joins: Where pushes are waited for.

    Complexity: O(I + E) for I instructions with E arguments.
    """
    live = _Live(schedule)
    in_place = {index for index, some in writes.after.items() if any(w.is_in_place for w in some)}
    in_place |= writes.scratch.keys()
    when_over = joins.when_over[device]
    for index, (kind, what, transfer) in enumerate(schedule.instructions[device]):
        joined: list[int] = []
        for send in when_over.get(index, ()):
            live.join(send, joined)
        taken: list[int] = []
        if kind == "call":
            over = writes.fused.get(index)
            places = {write.output for write in over} if over else ()
            live.call(what, index in in_place, places, taken)
        elif kind == "send":
            live.send(transfer, what)
        elif kind == "receive":
            for send in joins.before_wait.get(transfer, ()):
                live.join(send, joined)
        freed: list[int] = []
        for write in writes.after.get(index, ()):
            if write.may_stand_in:
                live.drop(write.tensor, freed)
        for gone in (writes.drops.get(index), writes.dead.get(index)):
            for tensor in gone or ():
                live.drop(tensor, freed)
        yield Change(joined, what if kind == "call" else -1, taken, freed)


def replay(
    changes: Iterable[Change], graph: OpGraph, heap: HeapTally, workspace_bytes: Mapping[int, int]
) -> None:
    """Take and give memory as a step does; an op has its workspace beside its outputs.

    Args:
        changes: Of `memory_changes`.
        graph: The step.
        heap: Where the tensors lie.
        workspace_bytes: Op -> workspace, of ops that have one.
    """
    lying: dict[int, HeapBlock] = {}
    tensors = graph.tensors
    for joined, op, taken, freed in changes:
        for tensor in joined:
            heap.give(lying.pop(tensor))
        for tensor in taken:
            lying[tensor] = heap.take(tensors[tensor].num_bytes)
        if op in workspace_bytes:
            heap.give(heap.take(workspace_bytes[op]))
        for tensor in freed:
            heap.give(lying.pop(tensor))


class _Live:
    """In whose memory each value of a device lies, and how much still needs that."""

    def __init__(self, schedule: Schedule) -> None:
        self._graph, self._transfers = schedule.graph, schedule.transfers
        self._memory: dict[int, int] = {}  # of each value; not there if it lies elsewhere
        self._uses: dict[int, int] = {}
        self._pending: dict[int, deque[tuple[int, int | None]]] = {}
        self._joined: set[int] = set()

    def call(self, op: int, is_in_place: bool, over: Collection[int], taken: list[int]) -> None:
        """An op gives its outputs, those `over` in older memory; `taken` gets what takes memory."""
        record, memory = self._graph.ops[op], self._memory
        if record.is_view:
            base = memory.get(record.alias_of)
            if base is not None:
                for tensor in record.outputs:
                    if tensor not in memory:
                        memory[tensor] = base
                        self._uses[base] += 1
        elif not is_in_place:
            for place, tensor in enumerate(record.outputs):
                if place not in over and self._graph.tensors[tensor].num_bytes:
                    memory[tensor] = tensor
                    self._uses[tensor] = 1
                    taken.append(tensor)

    def drop(self, tensor: int, freed: list[int]) -> None:
        """Nothing needs a value any more; `freed` gets the tensor whose memory that frees."""
        self._release(self._memory.pop(tensor, None), freed)

    def send(self, transfer: int, tensor: int) -> None:
        """A push holds its tensor until it is joined."""
        memory = self._memory.get(tensor)
        if memory is not None:
            self._uses[memory] += 1
        lane = lane_of(self._transfers[transfer])
        self._pending.setdefault(lane, deque()).append((transfer, memory))

    def join(self, transfer: int, freed: list[int]) -> None:
        """A push, and all before it on its stream, are over."""
        pending = self._pending.get(lane_of(self._transfers[transfer]))
        while pending and transfer not in self._joined:
            first, memory = pending.popleft()
            self._joined.add(first)
            self._release(memory, freed)

    def _release(self, memory: int | None, freed: list[int]) -> None:
        if memory is not None:
            self._uses[memory] -= 1
            if not self._uses[memory]:
                freed.append(memory)
