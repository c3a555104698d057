"""GPU memory reserved beyond the peak in use, from gaps in torch's allocator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from devplace.graph.overwrite import OUT_FORMS, overwritten_sources
from devplace.problem import Problem
from devplace.simulator.critical import device_orders
from devplace.simulator.heap import Heap, HeapBlock, block_bytes
from devplace.simulator.reference import CoreTimeline
from devplace.simulator.send_lifetimes import join_positions

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Rows = list[list[int]]

# An op with a large workspace takes it in several parts, of which only the sum is known; each may
# need one of torch's pieces of 20 MiB. ResNet-50 on H200 reserved 39 and 19 MiB more than replayed.
LARGE_WORKSPACE_BYTES = 20 * 2**20
WORKSPACE_SPARE_BYTES = 40 * 2**20


def gap_bytes(problem: Problem, device: I32, run: CoreTimeline) -> I64:
    """Bytes torch reserves for a step beyond the peak that `run` has, per device. int64 `[D]`

    What is held between steps (parameters, state, inputs, receive buffers) lies in whole blocks;
    all else comes from a `Heap`, in which the step is replayed as a CUDA graph records it: before
    each op of a device's order, what nothing needs any more is freed, then the op's outputs and
    workspace are taken. 0 on devices without fixed buffers.

    Args:
        problem: What was simulated.
        device: Device of each task. int32 `[N]`
        run: Its simulation.

    Complexity: O((N + E) log N) in Python, about 40 us per task.
    """
    found = np.zeros(problem.core.num_devices, np.int64)
    fixed = problem.core.wires.fixed_buffers
    orders = device_orders(problem.core, device, run)
    if not any(fixed[d] and orders[d] for d in range(len(found))):
        return found
    steps = StepHeaps(problem, device, run, orders)
    for d, order in enumerate(orders):
        if fixed[d] and order:
            reserved = steps.held_bytes(d) + steps.heap_bytes(d) + steps.spare_bytes(d)
            found[d] = max(0, reserved - int(run.peak_bytes[d]))
    return found


@dataclass(frozen=True)
class _Result:
    """A value that replaces a source.

    Attributes:
        old, new: Storages of both.
        is_over: Whether its op may write into the old value's memory.
        is_view: Whether it is a view of the new storage.
    """

    old: int
    new: int
    is_over: bool
    is_view: bool


class StepHeaps:
    """What each device reserves for a step.

    Args:
        problem: What was simulated.
        device: Device of each task. int32 `[N]`
        run: Its simulation.
        orders: Of `device_orders`.
    """

    def __init__(self, problem: Problem, device: I32, run: CoreTimeline, orders: Rows) -> None:
        self._problem, self._device, self._run, self._orders = problem, device, run, orders
        tasks = problem.core.tasks
        self._position = np.zeros(len(device), np.int64)
        for order in orders:
            self._position[order] = np.arange(len(order))
        self._maker = tasks.storage_maker
        self._ptr = tasks.storage_ptr.tolist()
        self._size = tasks.storage_bytes.tolist()
        self._last = self._last_reads()
        self._replaced, self._kept = _results(problem)
        self._joins = join_positions(problem, device, orders, run.transfers)

    def held_bytes(self, d: int) -> int:
        """What lies on a device between steps, and receive buffers."""
        core, device = self._problem.core, self._device
        tasks = core.tasks
        sizes = [
            int(size)
            for users, size in zip(pairwise(tasks.const_ptr), tasks.const_bytes, strict=True)
            if (device[tasks.const_user[slice(*users)]] == d).any()
        ]
        sources = tasks.is_source[self._maker].astype(bool) & (device[self._maker] == d)
        sizes += tasks.storage_bytes[sources].tolist()
        received = self._run.transfers[self._run.transfers[:, 2] == d, 0]
        sizes += tasks.carrier_bytes[received].tolist()
        return int(core.wires.held_bytes[d]) + sum(block_bytes(size) for size in sizes)

    def heap_bytes(self, d: int) -> int:
        """What the captured step of a device reserves.

        The executor asks for what its large tensors take at once in one piece first.
        """
        elsewhere, frees = self._frees(d)
        trial = self._replay(d, Heap(), elsewhere, frees)
        return self._replay(d, Heap(trial.large_peak_bytes), elsewhere, frees).num_bytes

    def spare_bytes(self, d: int) -> int:
        """What ops with large workspaces may need in pieces of their own."""
        workspaces = self._problem.core.tasks.workspace_bytes[self._orders[d]]
        is_large = int(workspaces.max(initial=0)) >= LARGE_WORKSPACE_BYTES
        return WORKSPACE_SPARE_BYTES if is_large else 0

    def _replay(self, d: int, heap: Heap, elsewhere: set[int], frees: dict[int, list[int]]) -> Heap:
        workspace = self._problem.core.tasks.workspace_bytes
        lying: dict[int, HeapBlock] = {}
        for position, task in enumerate(self._orders[d]):
            for storage in frees.get(position, ()):
                if storage in lying:
                    heap.give(lying.pop(storage))
            for storage in range(self._ptr[task], self._ptr[task + 1]):
                if storage not in elsewhere and self._size[storage]:
                    lying[storage] = heap.take(self._size[storage])
            if workspace[task]:
                heap.give(heap.take(int(workspace[task])))
        return heap

    def _frees(self, d: int) -> tuple[set[int], dict[int, list[int]]]:
        """Storages of a device that lie in memory of sources, and position -> those freed there."""
        device, end = self._device, len(self._orders[d])
        mine = np.flatnonzero(device[self._maker] == d).tolist()
        until = {s: self._last[s] + 1 for s in mine}
        for storage, position in self._joins.items():
            if storage in until:
                until[storage] = max(until[storage], position)
        until.update((s, end) for s in mine if s in self._kept)
        elsewhere: set[int] = set()
        for result in self._replaced:
            if result.old in until and result.new not in self._kept:
                self._replace(result, until, elsewhere)
        frees: dict[int, list[int]] = defaultdict(list)
        for storage, position in until.items():
            frees[position].append(storage)
        return elsewhere, frees

    def _replace(self, result: _Result, until: dict[int, int], elsewhere: set[int]) -> None:
        """As `run/write_back.py`: over the old value, or copied there once nothing reads it."""
        made = int(self._position[self._maker[result.new]])
        read = self._last[result.old]
        if result.is_over and read <= made:
            elsewhere.add(result.new)
        elif result.is_view:
            until[result.new] = max(until[result.new], made + 1, read + 1)
        else:
            until[result.new] = max(made, read) + 1
        if 0 <= read < made:
            task = self._orders[int(self._device[self._maker[result.old]])][read]
            elsewhere.update(self._scratch(task, result.old, made))

    def _scratch(self, task: int, old: int, made: int) -> list[int]:
        """Output of the last op that reads a source, if it can lie there until the new value."""
        graph, tasks = self._problem.graph, self._problem.core.tasks
        op = graph.ops[tasks.task_op[task]]
        new = self._ptr[task]
        if not op.outputs or op.target not in OUT_FORMS:
            return []
        if new in self._kept or self._last[new] > made:
            return []
        source = graph.ops[tasks.task_op[self._maker[old]]].outputs[0]
        before, now = graph.tensors[source], graph.tensors[op.outputs[0]]
        alike = (before.shape, before.dtype) == (now.shape, now.dtype)
        return [new] if alike and source in op.inputs else []

    def _last_reads(self) -> list[int]:
        """Position of the last op of its own device that reads or makes each storage; -1 for
        sources that none reads. `[S]`"""
        tasks, device = self._problem.core.tasks, self._device
        last = np.where(tasks.is_source[self._maker], -1, self._position[self._maker])
        carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
        storage = tasks.carrier_storage[carrier]
        here = device[tasks.cons] == device[self._maker[storage]]
        np.maximum.at(last, storage[here], self._position[tasks.cons[here]])
        found: list[int] = last.tolist()
        return found


def _results(problem: Problem) -> tuple[list[_Result], set[int]]:
    """Values that replace sources; and storages that are kept to the end of the step."""
    graph, tasks = problem.graph, problem.core.tasks
    over = overwritten_sources(graph)
    replaced: list[_Result] = []
    kept: set[int] = set()
    for result in graph.results:
        maker, root = graph.producer[result.tensor], result.tensor
        while graph.ops[graph.producer[root]].is_view:
            root = graph.ops[graph.producer[root]].alias_of
        op = graph.producer[root]
        if tasks.op_task[op] < 0:
            continue
        new = int(tasks.storage_ptr[tasks.op_task[op]]) + sorted(graph.ops[op].outputs).index(root)
        if result.replaces < 0 or graph.ops[op].is_source:
            kept.add(new)
            continue
        old = int(tasks.storage_ptr[tasks.op_task[result.replaces]])
        is_over = over.get(result.tensor) == result.replaces
        replaced.append(_Result(old, new, is_over, graph.ops[maker].is_view))
    # a source that a result still shows at the end is overwritten only then
    late = {result.new for result in replaced if result.old in kept}
    return replaced, kept | late
