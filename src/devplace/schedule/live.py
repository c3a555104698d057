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
        at: Index of the instruction.
        joined: Tensors that are free before it, because pushes of them are over by then.
        op: The op that is called, or -1.
        taken: Tensors that it takes memory for.
        freed: Tensors that nothing needs after it.
    """

    at: int
    joined: Sequence[int]
    op: int
    taken: Sequence[int]
    freed: Sequence[int]


def memory_changes(
    schedule: Schedule, device: int, writes: DeviceWrites, joins: PushJoins
) -> Iterator[Change]:
    """What instructions take and free, workspaces of ops apart; of those that do, and of all calls.

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
    after, drops, dead = writes.after, writes.drops, writes.dead
    for index, (kind, what, transfer) in enumerate(schedule.instructions[device]):
        joined: Sequence[int] = ()
        taken: Sequence[int] = ()
        freed: Sequence[int] = ()
        if index in when_over or kind == "receive":
            due = (*when_over.get(index, ()), *joins.before_wait.get(transfer, ()))
            joined = [tensor for send in due for tensor in live.join(send)]
        if kind == "call":
            over = writes.fused.get(index)
            places = {write.output for write in over} if over else ()
            taken = live.call(what, index in in_place, places)
        elif kind == "send":
            live.send(transfer, what)
        if index in after or index in drops or index in dead:
            stand_ins = (w.tensor for w in after.get(index, ()) if w.may_stand_in)
            gone = (*stand_ins, *drops.get(index, ()), *dead.get(index, ()))
            freed = [memory for tensor in gone if (memory := live.drop(tensor)) >= 0]
        if taken or freed or joined or kind == "call":
            yield Change(index, joined, what if kind == "call" else -1, taken, freed)


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
    for _, joined, op, taken, freed in changes:
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
        self._pending: dict[int, deque[tuple[int, int]]] = {}
        self._joined: set[int] = set()

    def call(self, op: int, is_in_place: bool, over: Collection[int]) -> Sequence[int]:
        """An op gives its outputs, those `over` in older memory; gives what takes memory."""
        record, memory = self._graph.ops[op], self._memory
        if not record.is_view:
            taken = [
                tensor
                for place, tensor in enumerate(() if is_in_place else record.outputs)
                if place not in over and self._graph.tensors[tensor].num_bytes
            ]
            for tensor in taken:
                memory[tensor] = tensor
                self._uses[tensor] = 1
            return taken
        base = memory.get(record.alias_of, -1)
        for tensor in record.outputs:
            if base >= 0 and tensor not in memory:
                memory[tensor] = base
                self._uses[base] += 1
        return ()

    def drop(self, tensor: int) -> int:
        """Nothing needs a value any more; gives the tensor whose memory that frees, or -1."""
        return self._release(self._memory.pop(tensor, -1))

    def send(self, transfer: int, tensor: int) -> None:
        """A push holds its tensor until it is joined."""
        memory = self._memory.get(tensor, -1)
        if memory >= 0:
            self._uses[memory] += 1
        lane = lane_of(self._transfers[transfer])
        self._pending.setdefault(lane, deque()).append((transfer, memory))

    def join(self, transfer: int) -> list[int]:
        """A push, and all before it on its stream, are over; gives what that frees."""
        pending = self._pending.get(lane_of(self._transfers[transfer]))
        freed = []
        while pending and transfer not in self._joined:
            first, memory = pending.popleft()
            self._joined.add(first)
            freed.append(self._release(memory))
        return [memory for memory in freed if memory >= 0]

    def _release(self, memory: int) -> int:
        if memory < 0:
            return -1
        self._uses[memory] -= 1
        return -1 if self._uses[memory] else memory
