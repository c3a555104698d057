"""Which tensors of a step take memory on a GPU, instruction by instruction."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from devplace.graph import OpGraph
from devplace.schedule.heap import Heap, HeapBlock
from devplace.schedule.linear import PushJoins, lane_of
from devplace.schedule.schedule import Schedule, last_uses
from devplace.schedule.write_back import DeviceWrites


class Change(NamedTuple):
    """What an instruction does to a device's memory.

    Attributes:
        joined: Tensors that are free before it, because pushes of them are over by then.
        op: The op that is called, or -1.
        taken: Tensors that it takes memory for.
        freed: Tensors that nothing needs after it.
    """

    joined: tuple[int, ...]
    op: int
    taken: tuple[int, ...]
    freed: tuple[int, ...]


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
    dead = last_uses(schedule, device)
    when_over = joins.when_over[device]
    for index, instruction in enumerate(schedule.instructions[device]):
        kind, what, transfer = instruction
        due = when_over.get(index, ())
        if kind == "receive":
            due = (*due, *joins.before_wait.get(transfer, ()))
        joined = [tensor for send in due for tensor in live.join(send)]
        taken: tuple[int, ...] = ()
        if kind == "call":
            over = {write.output for write in writes.fused.get(index, ())}
            taken = live.call(what, writes.in_place(index) is not None, over)
        elif kind == "send":
            live.send(transfer, what)
        freed: list[int] = []
        for write in writes.after.get(index, ()):
            if write.may_stand_in:
                freed += live.drop(write.tensor)
        for tensor in (*writes.drops.get(index, ()), *dead.get(index, ())):
            freed += live.drop(tensor)
        yield Change(tuple(joined), what if kind == "call" else -1, taken, tuple(freed))


def replay(
    changes: Iterable[Change], graph: OpGraph, heap: Heap, workspace_bytes: Mapping[int, int]
) -> None:
    """Take and give memory as a step does; an op has its workspace beside its outputs.

    Args:
        changes: Of `memory_changes`.
        graph: The step.
        heap: Where the tensors lie.
        workspace_bytes: Op -> workspace, of ops that have one.
    """
    lying: dict[int, HeapBlock] = {}
    for joined, op, taken, freed in changes:
        for tensor in joined:
            heap.give(lying.pop(tensor))
        for tensor in taken:
            lying[tensor] = heap.take(graph.tensors[tensor].num_bytes)
        workspace = workspace_bytes.get(op, 0)
        if workspace:
            heap.give(heap.take(workspace))
        for tensor in freed:
            heap.give(lying.pop(tensor))


class _Live:
    """In whose memory each value of a device lies, and how much still needs that."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._memory: dict[int, int] = {}  # of each value; not there if it lies elsewhere
        self._uses: Counter[int] = Counter()
        self._pending: dict[int, deque[tuple[int, int]]] = {}
        self._joined: set[int] = set()

    def call(self, op: int, is_in_place: bool, over: set[int]) -> tuple[int, ...]:
        """An op gives its outputs, those `over` in older memory; gives what takes memory."""
        graph = self._schedule.graph
        record = graph.ops[op]
        if record.is_view:
            base = self._memory.get(record.alias_of, -1)
            for tensor in record.outputs:
                if base >= 0 and tensor not in self._memory:
                    self._hold(tensor, base)
            return ()
        taken = tuple(
            tensor
            for place, tensor in enumerate(record.outputs)
            if not is_in_place and place not in over and graph.tensors[tensor].num_bytes
        )
        for tensor in taken:
            self._hold(tensor, tensor)
        return taken

    def drop(self, tensor: int) -> list[int]:
        """Nothing needs a value any more; gives the tensor whose memory that frees, if any."""
        return self._release(self._memory.pop(tensor, -1))

    def send(self, transfer: int, tensor: int) -> None:
        """A push holds its tensor until it is joined."""
        memory = self._memory.get(tensor, -1)
        self._uses[memory] += 1
        lane = lane_of(self._schedule.transfers[transfer])
        self._pending.setdefault(lane, deque()).append((transfer, memory))

    def join(self, transfer: int) -> list[int]:
        """A push, and all before it on its stream, are over."""
        pending = self._pending.get(lane_of(self._schedule.transfers[transfer]))
        found: list[int] = []
        while pending and transfer not in self._joined:
            first, memory = pending.popleft()
            self._joined.add(first)
            found += self._release(memory)
        return found

    def _hold(self, tensor: int, memory: int) -> None:
        self._memory[tensor] = memory
        self._uses[memory] += 1

    def _release(self, memory: int) -> list[int]:
        if memory < 0:
            return []
        self._uses[memory] -= 1
        return [] if self._uses[memory] else [memory]
