"""GPU memory reserved beyond the peak in use, from gaps in torch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem
from devplace.schedule import source_bytes, write_backs
from devplace.schedule.heap import Heap, HeapTally, block_bytes
from devplace.schedule.linear import PushJoins
from devplace.schedule.live import memory_changes, replay
from devplace.schedule.lowering import lower
from devplace.simulator.critical import device_orders
from devplace.simulator.reference import CoreTimeline

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# An op with a large workspace takes it in several parts, of which only the sum is known; each may
# need one of torch's pieces of 20 MiB. ResNet-50 on H200 reserved 39 and 19 MiB more than replayed.
LARGE_WORKSPACE_BYTES = 20 * 2**20
WORKSPACE_SPARE_BYTES = 40 * 2**20


def gap_bytes(problem: Problem, device: I32, run: CoreTimeline) -> I64:
    """Bytes torch reserves for a step beyond the peak that `run` has, per device. int64 `[D]`

    What is held between steps (parameters, state, inputs, receive buffers) lies in whole blocks;
    all else comes from a `Heap`, in which the step is replayed as a CUDA graph records it, from the
    schedule that the executors carry out. 0 on devices without fixed buffers.

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
    with _no_collection():
        steps = StepHeaps(problem, device, orders)
        for d, order in enumerate(orders):
            if fixed[d] and order:
                reserved = steps.held_bytes(d) + steps.heap_bytes(d) + steps.spare_bytes(d)
                found[d] = max(0, reserved - int(run.peak_bytes[d]))
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's search for cycles: a schedule is many small records and no cycle, and beside
    torch's own objects half of the time went into that search."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepHeaps:
    """What each device reserves for a step.

    Args:
        problem: What was simulated.
        device: Device of each task. int32 `[N]`
        orders: Of `device_orders`.
    """

    def __init__(self, problem: Problem, device: I32, orders: list[list[int]]) -> None:
        self._problem, self._orders = problem, orders
        task_op = problem.core.tasks.task_op
        self._schedule = lower(
            problem.graph,
            problem.spaces.op_devices(device).tolist(),
            [task_op[order].tolist() for order in orders],
            problem.machine.device_names,
        )
        self._writes = write_backs(self._schedule)
        self._joins = PushJoins.of(self._schedule)

    def held_bytes(self, d: int) -> int:
        """What lies on a device between steps, and receive buffers."""
        sizes = list(source_bytes(self._schedule, d).values())
        sizes += [record.num_bytes for record in self._schedule.transfers if record.dst == d]
        held = int(self._problem.core.wires.held_bytes[d])
        return held + sum(block_bytes(size) for size in sizes)

    def heap_bytes(self, d: int) -> int:
        """What the captured step of a device reserves.

        The executor asks for what its large tensors take at once in one piece first.
        """
        changes = list(memory_changes(self._schedule, d, self._writes[d], self._joins))
        tasks, graph = self._problem.core.tasks, self._problem.graph
        order = self._orders[d]
        workspaces = zip(tasks.task_op[order], tasks.workspace_bytes[order], strict=True)
        workspace_bytes = {int(op): int(size) for op, size in workspaces if size}
        trial = HeapTally()
        replay(changes, graph, trial, workspace_bytes)
        heap = Heap(trial.large_peak_bytes)
        replay(changes, graph, heap, workspace_bytes)
        return heap.num_bytes

    def spare_bytes(self, d: int) -> int:
        """What ops with large workspaces may need in pieces of their own."""
        workspaces = self._problem.core.tasks.workspace_bytes[self._orders[d]]
        is_large = int(workspaces.max(initial=0)) >= LARGE_WORKSPACE_BYTES
        return WORKSPACE_SPARE_BYTES if is_large else 0
