"""Contents of each device at its memory peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.graph import Op, OpGraph
from devplace.graph.members import Part, readers_in, stage_of
from devplace.problem import Tasks
from devplace.simulator import Timeline

I64 = NDArray[np.int64]
CATEGORIES = (
    "parameters",
    "optimizer state",
    "gradients",
    "activations",
    "temporaries",
    "inputs",
    "receive buffers",
    "work buffers",
    "gaps",
)
PARAMETERS, STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, INPUTS, RECEIVED, WORK, GAPS = range(9)
_ROLE = {
    "parameter": PARAMETERS,
    "buffer": PARAMETERS,
    "constant": PARAMETERS,
    "state": STATE,
    "input": INPUTS,
    "scalar": INPUTS,
}
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class MemoryRow:
    """One device at its peak.

    Attributes:
        device: Name.
        peak_ns: When it is reached first.
        parts: Category (`CATEGORIES`) -> bytes; they add up to the simulated peak. Buffers and
            constants count as parameters. A new value of a parameter or of state is temporary as
            long as the old one is there, so that both add up to what model and optimizer have.
            Gradients are those of parameters; activations are forward values that backward or
            update reads; all else that the step computes, and workspace, is temporary. GPUs hold
            all receive buffers, and work buffers (of libraries, outside single ops), for the whole
            step. Gaps are what torch reserves beyond what is in use at the peak.
        limit_bytes: Most bytes a step may use there.
    """

    device: str
    peak_ns: int
    parts: dict[str, int]
    limit_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak."""
        return sum(self.parts.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes over the limit, 0 when it fits."""
        return max(0, self.peak_bytes - self.limit_bytes)


def memory_rows(timeline: Timeline) -> list[MemoryRow]:
    """Breakdown of every device's peak, in machine order.

    Complexity: O(V + E + D * S) with numpy; 0.1 s for 16,000 ops.
    """
    lifetimes = _Lifetimes(timeline)
    limits = timeline.problem.limit_bytes
    rows = []
    for d, name in enumerate(timeline.problem.machine.device_names):
        when = _peak_time(timeline, d)
        parts = lifetimes.parts(d, when)
        # Ops that take no time can begin and end within the instant of the peak. What they held
        # is gone when the instant is over, so it is not in `parts` yet.
        parts[TEMPORARIES] += int(timeline.run.peak_bytes[d]) - sum(parts)
        parts[GAPS] = int(timeline.gap_bytes[d])
        rows.append(MemoryRow(name, when, dict(zip(CATEGORIES, parts, strict=True)), limits[d]))
    return rows


def memory_by_module(timeline: Timeline) -> dict[str, int]:
    """Bytes in use at the peaks of all devices, by the module whose op made the tensor.

    Receive buffers count for the module that sends. Work buffers, gaps, and what begins and ends
    within the instant of a peak belong to no module and are not in it.
    """
    lifetimes = _Lifetimes(timeline)
    found: Counter[str] = Counter()
    for d in range(len(timeline.problem.machine.devices)):
        for op, num_bytes in lifetimes.held_by(d, _peak_time(timeline, d)):
            found[timeline.problem.graph.ops[op].module] += num_bytes
    return dict(found)


def _peak_time(timeline: Timeline, device: int) -> int:
    rows = timeline.memory[timeline.memory[:, 1] == device]
    full = rows[rows[:, 2] == timeline.run.peak_bytes[device]]
    return int(full[0, 0]) if len(full) else 0


class _Lifetimes:
    """From when to when each storage, copy, workspace and constant takes memory."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.tasks = tasks = timeline.problem.core.tasks
        self.device = timeline.task_devices
        self.start = timeline.run.start_ns
        self.finish = timeline.run.finish_ns
        self.owner = tasks.storage_maker
        self.edge_carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
        self.category = _categories(timeline, self.owner, self.edge_carrier)
        self.line, self.rank = _lines(timeline, self.owner, self.category)
        self._copies()
        self._storages()

    def _copies(self) -> None:
        tasks, count = self.tasks, len(self.timeline.problem.machine.devices)
        moved = [
            (tasks.carrier_of[t.tensor], t.dst, t.request_ns, t.arrival_ns)
            for t in self.timeline.transfers
        ]
        table = np.array(moved, np.int64).reshape(-1, 4)
        self.copy_carrier, self.copy_device, self.copy_start, self.copy_arrival = table.T
        last_read = np.zeros(len(tasks.carrier_bytes) * count, np.int64)
        key = self.edge_carrier * count + self.device[tasks.cons]
        np.maximum.at(last_read, key, self.finish[tasks.cons])
        self.copy_end = last_read[self.copy_carrier * count + self.copy_device]
        wires = self.timeline.problem.core.wires
        kept = wires.fixed_buffers.astype(bool)[self.copy_device]
        self.copy_start = np.where(kept, 0, self.copy_start)
        self.copy_end[kept] = _FOREVER
        self.held = np.zeros(count, np.int64)
        used = np.unique(self.device)
        self.held[used] = wires.held_bytes[used]

    def _storages(self) -> None:
        tasks = self.tasks
        self.storage_end = self.finish[self.owner].copy()
        storage = tasks.carrier_storage[self.edge_carrier]
        same = self.device[tasks.cons] == self.device[self.owner[storage]]
        np.maximum.at(self.storage_end, storage[same], self.finish[tasks.cons[same]])
        sent = tasks.carrier_storage[self.copy_carrier]
        np.maximum.at(self.storage_end, sent, self.copy_arrival)
        self.storage_start = self.start[self.owner].copy()
        for new in np.flatnonzero(tasks.storage_over >= 0).tolist():
            self._start_over(new, int(tasks.storage_over[new]))
        self.storage_end[tasks.storage_held.astype(bool)] = _FOREVER

    def _start_over(self, new: int, old: int) -> None:
        """A value computed over a source that nothing else reads takes memory from its op's end."""
        tasks, maker = self.tasks, self.owner[new]
        d = self.device[maker]
        if not self.timeline.problem.core.wires.fixed_buffers[d]:
            return
        readers = tasks.cons[tasks.carrier_storage[self.edge_carrier] == old]
        here = readers[(self.device[readers] == d) & (readers != maker)]
        sent = self.copy_arrival[tasks.carrier_storage[self.copy_carrier] == old]
        others = max(self.finish[here].max(initial=0), sent.max(initial=0))
        is_held = bool(tasks.storage_held[old])
        if not is_held and self.device[self.owner[old]] == d and others <= self.start[maker]:
            self.storage_start[new] = self.finish[maker]

    def parts(self, d: int, when: int) -> list[int]:
        """Bytes per category in use on a device after everything of that instant has happened."""
        tasks = self.tasks
        owner, size = self.owner, tasks.storage_bytes
        alive = (self.device[owner] == d) & (self.storage_start <= when) & (self.storage_end > when)
        category = np.where(self._repeats(alive), TEMPORARIES, self.category)
        parts = [int(size[alive & (category == c)].sum()) for c in range(len(CATEGORIES))]
        runs = (self.device == d) & (self.start <= when) & (self.finish > when)
        parts[TEMPORARIES] += int(tasks.workspace_bytes[runs].sum())
        here = (self.copy_device == d) & (self.copy_start <= when) & (self.copy_end > when)
        parts[RECEIVED] += int(tasks.carrier_bytes[self.copy_carrier[here]].sum())
        parts[WORK] = int(self.held[d])
        for const, op in enumerate(tasks.const_op.tolist()):
            users = tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]
            if (self.device[users] == d).any():
                role = self.timeline.problem.graph.ops[op].role
                parts[_ROLE.get(role, INPUTS)] += int(tasks.const_bytes[const])
        return parts

    def held_by(self, d: int, when: int) -> Iterator[tuple[int, int]]:
        """Ops whose values or work take memory on a device at an instant, and how much."""
        tasks, owner = self.tasks, self.owner
        alive = (self.device[owner] == d) & (self.storage_start <= when) & (self.storage_end > when)
        runs = (self.device == d) & (self.start <= when) & (self.finish > when)
        here = (self.copy_device == d) & (self.copy_start <= when) & (self.copy_end > when)
        sent = tasks.carrier_storage[self.copy_carrier[here]]
        yield from zip(
            tasks.task_op[np.concatenate((owner[alive], np.flatnonzero(runs), owner[sent]))],
            np.concatenate(
                (
                    tasks.storage_bytes[alive],
                    tasks.workspace_bytes[runs],
                    tasks.carrier_bytes[self.copy_carrier[here]],
                )
            ).tolist(),
            strict=True,
        )
        for const, op in enumerate(tasks.const_op.tolist()):
            users = tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]
            if (self.device[users] == d).any():
                yield op, int(tasks.const_bytes[const])

    def _repeats(self, alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Values in use of a parameter or of state beyond the first of their line. `[S]`"""
        found = np.zeros(len(alive), bool)
        lined = np.flatnonzero(alive & (self.line >= 0))
        lined = lined[np.lexsort((self.rank[lined], self.line[lined]))]
        found[lined[1:][self.line[lined[1:]] == self.line[lined[:-1]]]] = True
        return found


def _categories(timeline: Timeline, owner: I64, edge_carrier: I64) -> I64:
    """Category of each storage. `[S]`"""
    graph, tasks = timeline.problem.graph, timeline.problem.core.tasks
    stage = np.array([graph.ops[op].stage for op in tasks.task_op], dtype="U8")
    made = stage[owner]
    _refine_makers(graph, tasks, owner, made)
    storage, reader = tasks.carrier_storage[edge_carrier], stage[tasks.cons]
    _refine_readers(graph, tasks, edge_carrier, reader)
    read_late = np.zeros(len(owner), bool)
    read_late[storage[(reader == "backward") | (reader == "update")]] = True
    read_by_update = np.zeros(len(owner), bool)
    read_by_update[storage[reader == "update"]] = True
    category = np.full(len(owner), TEMPORARIES, np.int64)
    category[(made == "forward") & read_late] = ACTIVATIONS
    first = np.flatnonzero(read_by_update & (made == "backward"))
    category[_with_partial_sums(timeline, owner, first.tolist())] = GRADIENTS
    for s in np.flatnonzero(made == "source"):
        category[s] = _ROLE.get(graph.ops[tasks.task_op[owner[s]]].role, INPUTS)
    return category


def _refine_makers(graph: OpGraph, tasks: Tasks, owner: I64, made: NDArray[np.str_]) -> None:
    """Stage of what a fused group makes: that of the member that makes it."""
    for storage, task in enumerate(owner.tolist()):
        op = graph.ops[tasks.task_op[task]]
        if op.members:
            place = storage - int(tasks.storage_ptr[task])
            made[storage] = stage_of(graph, sorted(op.outputs)[place])


def _refine_readers(
    graph: OpGraph, tasks: Tasks, edge_carrier: I64, reader: NDArray[np.str_]
) -> None:
    """Stage of reading in a fused group: the last of the members that read; sums of a group that
    updates are read by the update."""
    for edge, task in enumerate(tasks.cons.tolist()):
        op = graph.ops[tasks.task_op[task]]
        if not op.members:
            continue
        found = readers_in(graph, op, int(tasks.carrier_tensor[edge_carrier[edge]]))
        updates = any(member.stage == "update" for member in op.members)
        stages = {"update" if updates and _is_sum(part) else part.stage for part in found}
        reader[edge] = next(s for s in ("update", "backward", "forward") if s in stages)


def _with_partial_sums(timeline: Timeline, owner: I64, gradients: list[int]) -> list[int]:
    """Gradient storages together with the terms that are added up into them."""
    graph, tasks = timeline.problem.graph, timeline.problem.core.tasks
    found, todo = set(gradients), list(gradients)
    while todo:
        storage = todo.pop()
        task = owner[storage]
        op = graph.ops[tasks.task_op[task]]
        for carrier in tasks.in_carrier[tasks.in_ptr[task] : tasks.in_ptr[task + 1]]:
            term = int(tasks.carrier_storage[carrier])
            maker = graph.ops[tasks.task_op[owner[term]]]
            same_size = tasks.storage_bytes[term] == tasks.storage_bytes[storage]
            is_term = _is_term(graph, op, int(tasks.carrier_tensor[carrier]))
            if is_term and same_size and maker.stage == "backward" and term not in found:
                found.add(term)
                todo.append(term)
    return sorted(found)


def _is_sum(part: Part) -> bool:
    return part.target.startswith("aten.add.") and part.stage == "backward"


def _is_term(graph: OpGraph, op: Op, tensor: int) -> bool:
    """Whether an op adds this tensor up: both sides of `add`, the first argument of `addmm`."""
    if any(part.target.startswith("aten.add.") for part in readers_in(graph, op, tensor)):
        return True
    return op.target.startswith("aten.add") and op.inputs[0] == tensor


def _lines(timeline: Timeline, owner: I64, category: I64) -> tuple[I64, I64]:
    """Which storages hold a parameter or state one after the other: the old value, what the update
    makes of it on the way, as Adam's decayed average, and the new value. Of those in use the first
    is the parameter or state, so that these add up to what model and optimizer have.

    Returns:
        Line of each storage, -1 for none, and its place in it. `[S]`
    """
    graph, tasks = timeline.problem.graph, timeline.problem.core.tasks
    line = np.full(len(owner), -1, np.int64)
    rank = np.zeros(len(owner), np.int64)
    for number, result in enumerate(graph.results):
        if result.role not in ("parameter", "buffer", "state"):
            continue
        old = graph.ops[result.replaces].outputs[0] if result.replaces >= 0 else -1
        ways = _way(graph, graph.storage[result.tensor], old)
        for place, tensor in enumerate(ways):
            maker = graph.producer[tensor]
            task = tasks.op_task[maker]
            if task >= 0 and (place or graph.ops[maker].is_source or len(ways) == 1):
                position = sorted(graph.ops[maker].outputs).index(tensor)
                storage = tasks.storage_ptr[task] + position
                line[storage], rank[storage] = number, place
                category[storage] = _ROLE[result.role]
    return line, rank


def _way(graph: OpGraph, new: int, old: int) -> list[int]:
    """Tensors of one size from an old value to the new one made of it, by ops of the update."""
    size, before = graph.tensors[new].num_bytes, {new: -1}
    todo = [new]
    while todo:
        tensor = todo.pop(0)
        if tensor == old:
            way = [tensor]
            while before[way[-1]] >= 0:
                way.append(before[way[-1]])
            return way
        maker = graph.ops[graph.producer[tensor]]
        for read in (graph.storage[t] for t in maker.inputs):
            stage = graph.ops[graph.producer[read]].stage
            is_on_way = read == old or stage == "update"
            if read not in before and is_on_way and graph.tensors[read].num_bytes == size:
                before[read] = tensor
                todo.append(read)
    return [new]
