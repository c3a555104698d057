"""Arrays for the simulators: tasks, transferred tensors, memory, links.

Views are folded away: a tensor that travels (a *carrier*) is either an op's own output, or a view
of a part of it. A view of the whole travels as its base. Read-only sources (inputs, constants,
parameters that the step does not replace) are on every device that reads them from the start, so
they are no tasks either: they take memory, and before the step begins a batch's inputs are copied
to them. In shapes `N` is tasks, `T` carriers, `S` storages,
`K` read-only sources, `D` devices, `G` colocation groups, `C` distinct link speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from devplace.cost import CostTable
from devplace.graph import OpGraph
from devplace.graph.coarsen import parameter_name
from devplace.graph.overwrite import overwritten_sources
from devplace.machine import Machine
from devplace.problem.transfers import Transfers, pointers, price_transfers

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tasks:
    """What has to be done, whatever the machine.

    Attributes:
        task_op: Op index of each task. `[N]`
        op_task: Task that owns each op's outputs, or -1 if they belong to a read-only source. `[V]`
        op_const: Read-only source that owns each op's outputs, or -1. `[V]`
        is_source: Whether a task is a source: there at time 0, taking no time. uint8 `[N]`
        group: Colocation group. `[N]`
        workspace_bytes: Held while a task runs. `[N]`
        out_ptr: Carriers made by task v are `out_ptr[v]:out_ptr[v+1]`. `[N+1]`
        carrier_tensor: Tensor id in the graph. `[T]`
        carrier_bytes: Bytes that cross a link. `[T]`
        carrier_storage: Storage it lies in. `[T]`
        cons_ptr, cons: Consumers of each carrier, ascending. `[T+1]`, `[E]`
        in_ptr, in_carrier: Carriers each task reads. `[N+1]`, `[E]`
        storage_ptr: Storages made by task v are `storage_ptr[v]:storage_ptr[v+1]`. `[N+1]`
        storage_bytes: `[S]`
        storage_held: Whether it is kept to the end of the step (a result). uint8 `[S]`
        storage_over: Storage of the source that it may be computed over, or -1. `[S]`
        const_op: Op index of each read-only source. `[K]`
        const_bytes: `[K]`
        const_ptr, const_user: Tasks that read it. `[K+1]`, `[..]`
        is_input: Whether it is of the batch. uint8 `[K]`
    """

    task_op: I32
    op_task: I32
    op_const: I32
    is_source: NDArray[np.uint8]
    group: I32
    workspace_bytes: I64
    out_ptr: I32
    carrier_tensor: I32
    carrier_bytes: I64
    carrier_storage: I32
    cons_ptr: I32
    cons: I32
    in_ptr: I32
    in_carrier: I32
    storage_ptr: I32
    storage_bytes: I64
    storage_held: NDArray[np.uint8]
    storage_over: I32
    const_op: I32
    const_bytes: I64
    const_ptr: I32
    const_user: I32
    is_input: NDArray[np.uint8]

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.task_op)

    @property
    def num_groups(self) -> int:
        """Number of colocation groups."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    @cached_property
    def carrier_maker(self) -> I64:
        """Task that makes each carrier. `[T]`"""
        return np.repeat(np.arange(self.num_tasks), np.diff(self.out_ptr))

    @cached_property
    def storage_maker(self) -> I64:
        """Task that makes each storage. `[S]`"""
        return np.repeat(np.arange(self.num_tasks), np.diff(self.storage_ptr))

    @cached_property
    def made_bytes(self) -> I64:
        """Bytes of all storages each task makes. `[N]`"""
        total = np.zeros(self.num_tasks, np.int64)
        np.add.at(total, self.storage_maker, self.storage_bytes)
        return total

    @cached_property
    def carrier_of(self) -> dict[int, int]:
        """Carrier of each tensor that travels, by tensor id."""
        return {tensor: carrier for carrier, tensor in enumerate(self.carrier_tensor.tolist())}


@dataclass(frozen=True, eq=False)
class Wires:
    """What the machine offers.

    Attributes:
        duration_ns: Time of each task on each device. `[N, D]`
        transfers: Of carriers between devices, and copies of the batch.
        streams: Ops a device runs at once. `[D]`
        limit_bytes: Memory a device may use. `[D]`
        fixed_buffers: Whether what is received and what outlives the step has fixed addresses
            there (GPUs): receive buffers are held for the whole step, and new state is computed
            over the old where that is possible. uint8 `[D]`
        held_bytes: Held for the whole step where any task runs, such as libraries' work
            buffers. `[D]`
        pool: Memory pool of each device, -1 for none. `[D]`
        pool_limit_bytes: `[P]`
    """

    duration_ns: I64
    transfers: Transfers
    streams: I32
    limit_bytes: I64
    fixed_buffers: NDArray[np.uint8]
    held_bytes: I64
    pool: I32
    pool_limit_bytes: I64


@dataclass(frozen=True, eq=False)
class Core:
    """Tasks and wires of one problem."""

    tasks: Tasks
    wires: Wires

    @property
    def transfers(self) -> Transfers:
        """What transfers take."""
        return self.wires.transfers

    def batch_ns(self, device: I32) -> int:
        """Time it takes to copy the batch to the devices that read it, one copy after the other.

        Args:
            device: Device of each task. int32 `[N]`
        """
        transfers = self.transfers
        return sum(
            int(transfers.copy_ns[const, np.unique(device[users])].sum())
            for const, users in self.copied()
        )

    def copied(self) -> Iterator[tuple[int, I32]]:
        """Read-only sources whose copies take time, and the tasks that read each."""
        tasks = self.tasks
        for const in self.transfers.copied:
            yield const, tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.wires.streams)


class _Layout:
    """Tasks, the carriers and storages they make, and who reads what; all by tensor id."""

    def __init__(self, graph: OpGraph) -> None:
        replaced = graph.replaced
        is_const = [op.is_source and index not in replaced for index, op in enumerate(graph.ops)]
        self.task_ops = [i for i, op in enumerate(graph.ops) if not op.is_view and not is_const[i]]
        self.const_ops = [i for i, const in enumerate(is_const) if const]
        self.task_of = {op: task for task, op in enumerate(self.task_ops)}
        self.const_of = {op: const for const, op in enumerate(self.const_ops)}
        self.reads: list[list[int]] = []
        self.const_users: list[list[int]] = [[] for _ in self.const_ops]
        self.made: list[list[int]] = [[] for _ in self.task_ops]
        self.stores: list[list[int]] = [[] for _ in self.task_ops]
        self.owner = [graph.producer[tensor] for tensor in graph.storage]
        self._collect_reads(graph)
        self._collect_made(graph)
        self.carriers = [t for row in self.made for t in row]
        self.storages = [t for row in self.stores for t in row]
        self.carrier_id = {t: i for i, t in enumerate(self.carriers)}
        self.storage_id = {t: i for i, t in enumerate(self.storages)}

    def _collect_reads(self, graph: OpGraph) -> None:
        for task, index in enumerate(self.task_ops):
            carriers = list(dict.fromkeys(graph.carrier[t] for t in graph.ops[index].inputs))
            for owner in {self.owner[t] for t in carriers} & self.const_of.keys():
                self.const_users[self.const_of[owner]].append(task)
            self.reads.append([t for t in carriers if self.owner[t] in self.task_of])

    def _collect_made(self, graph: OpGraph) -> None:
        travels = {t for row in self.reads for t in row}
        for tensor in range(len(graph.tensors)):
            task = self.task_of.get(self.owner[tensor])
            if task is None:
                continue
            if graph.storage[tensor] == tensor:
                self.stores[task].append(tensor)
            if tensor in travels:
                self.made[task].append(tensor)

    def consumers(self) -> list[list[int]]:
        """Tasks that read each carrier."""
        rows: list[list[int]] = [[] for _ in self.carriers]
        for task, row in enumerate(self.reads):
            for tensor in row:
                rows[self.carrier_id[tensor]].append(task)
        return rows

    def over(self, graph: OpGraph) -> I32:
        """Storage of the source that each storage may be computed over, or -1.

        Only where its op reads that source: otherwise the source is gone when it begins.
        """
        over = np.full(len(self.storages), -1, np.int32)
        for tensor, source in overwritten_sources(graph).items():
            (old,) = graph.ops[source].outputs
            if old in graph.ops[graph.producer[tensor]].inputs:
                over[self.storage_id[tensor]] = self.storage_id[old]
        return over

    def held(self, graph: OpGraph) -> NDArray[np.uint8]:
        """Whether each storage is kept to the end of the step."""
        held = np.zeros(len(self.storages), np.uint8)
        for result in graph.results:
            if self.owner[result.tensor] in self.task_of:
                held[self.storage_id[graph.storage[result.tensor]]] = 1
        return held


def build_tasks(graph: OpGraph, workspace_bytes: I64 | None = None) -> Tasks:
    """Fold views and read-only sources away and lay the rest out as arrays.

    Args:
        graph: What is computed.
        workspace_bytes: Measured workspace of each op; by default those the graph tells. `[V]`
    """
    if workspace_bytes is None:
        workspace_bytes = np.array([op.workspace_bytes for op in graph.ops], np.int64)
    layout = _Layout(graph)
    owners = [layout.owner[op.outputs[0]] if op.outputs else i for i, op in enumerate(graph.ops)]
    size = np.array([t.num_bytes for t in graph.tensors], np.int64)
    const_bytes = [sum(size[t] for t in graph.ops[i].outputs) for i in layout.const_ops]
    cons_ptr, cons = pointers(layout.consumers())
    in_ptr, in_carrier = pointers([[layout.carrier_id[t] for t in row] for row in layout.reads])
    const_ptr, const_user = pointers(layout.const_users)
    storage_of = [layout.storage_id[graph.storage[t]] for t in layout.carriers]
    return Tasks(
        task_op=np.array(layout.task_ops, np.int32),
        op_task=np.array([layout.task_of.get(o, -1) for o in owners], np.int32),
        op_const=np.array([layout.const_of.get(o, -1) for o in owners], np.int32),
        is_source=np.array([graph.ops[i].is_source for i in layout.task_ops], np.uint8),
        group=_groups(graph, layout),
        workspace_bytes=workspace_bytes[np.array(layout.task_ops, np.int64)],
        out_ptr=pointers(layout.made)[0],
        carrier_tensor=np.array(layout.carriers, np.int32),
        carrier_bytes=size[np.array(layout.carriers, np.int64)],
        carrier_storage=np.array(storage_of, np.int32),
        cons_ptr=cons_ptr,
        cons=cons,
        in_ptr=in_ptr,
        in_carrier=in_carrier,
        storage_ptr=pointers(layout.stores)[0],
        storage_bytes=size[np.array(layout.storages, np.int64)],
        storage_held=layout.held(graph),
        storage_over=layout.over(graph),
        const_op=np.array(layout.const_ops, np.int32),
        const_bytes=np.array(const_bytes, np.int64),
        const_ptr=const_ptr,
        const_user=const_user,
        is_input=np.array([graph.ops[i].role == "input" for i in layout.const_ops], np.uint8),
    )


def _groups(graph: OpGraph, layout: _Layout) -> I32:
    """A source that is replaced sits with its state and with the ops that replace it."""
    owner, task_of = layout.owner, layout.task_of
    parent = list(range(len(task_of)))

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def join(a: int, b: int) -> None:
        low, high = sorted((find(a), find(b)))
        parent[high] = low

    state_home: dict[str, int] = {}
    for source, tensor in graph.replaced.items():
        task = task_of[source]
        if owner[tensor] in task_of:
            join(task, task_of[owner[tensor]])
        op = graph.ops[source]
        if op.role in ("parameter", "state"):
            home = parameter_name(op.name, op.role)
            join(task, state_home.setdefault(home, task))
    roots = {find(x): None for x in range(len(parent))}
    number = {root: i for i, root in enumerate(roots)}
    return np.array([number[find(x)] for x in range(len(parent))], np.int32)


def build_wires(
    tasks: Tasks,
    machine: Machine,
    costs: CostTable,
    limit_bytes: Sequence[int],
    batch_on: str = "",
) -> Wires:
    """Price tasks, transfers and the copies of a batch on the machine.

    Args:
        tasks: What has to be done.
        machine: Where.
        costs: Times of ops.
        limit_bytes: Memory a device may use. `[D]`
        batch_on: Device on which the batch lies; default: the host.
    """
    pools = {pool.name: i for i, pool in enumerate(machine.pools)}
    reserve = {name: 0 for name in pools}
    for device in machine.devices:
        if device.pool:
            reserve[device.pool] += device.reserve_bytes
    durations = costs.compute_ns[tasks.task_op]
    durations[tasks.is_source.astype(bool)] = 0
    return Wires(
        duration_ns=np.ascontiguousarray(durations, np.int64),
        transfers=price_transfers(
            tasks.carrier_bytes, tasks.const_bytes, tasks.is_input, machine, batch_on
        ),
        streams=np.array([device.streams for device in machine.devices], np.int32),
        limit_bytes=np.array(limit_bytes, np.int64),
        fixed_buffers=np.array(
            [device.traits.fixed_addresses for device in machine.devices], np.uint8
        ),
        held_bytes=(
            np.zeros(len(machine.devices), np.int64)
            if costs.held_bytes is None
            else costs.held_bytes
        ),
        pool=np.array([pools.get(device.pool, -1) for device in machine.devices], np.int32),
        pool_limit_bytes=np.array(
            [max(0, pool.memory_bytes - reserve[pool.name]) for pool in machine.pools], np.int64
        ),
    )
