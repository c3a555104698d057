"""How long a tensor that a GPU pushes keeps its memory there.

A captured step lets its ops wait for ("join") a push before some op; from then on the pushed memory
is free. Where, `run/linear.py` decides from rough times alone, which are here. `join_positions`
finds the same places from orders and transfers, without a program to run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devplace.errors import PlanError
from devplace.graph import Op
from devplace.problem import Problem

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# Rough times of a data-centre GPU, and of a CPU beside it: an op, bytes/ns, FLOP/ns. They only
# choose among orders that are all right.
GPU_TIMES = (3_000, 2_000, 200_000)
CPU_TIMES = (10_000, 20, 500)
TRANSFER_NS = 8_000
LINK_BYTES_PER_NS = 250
# Ops wait for a push to give its memory free once it should have been over for this long again: as
# much as it took. A join costs an edge of the graph, so small tensors are left to the next wait.
PATIENCE = 2
JOINED_BYTES = 2**20

# From this size on the copy engine carries a tensor. Alone it catches up only at 32 MiB (4 MiB: 25
# us by engine, 17 by kernel), but it leaves the multiprocessors to the ops: a BERT-large step on
# two H100 took 28.3 ms with 4 MiB, 28.8 with 16 MiB, 30.8 without the engine.
COPY_ENGINE_BYTES = 4 * 2**20


def rough_op_ns(op: Op, is_on_cpu: bool) -> int:
    """About how long an op takes; 0 for views."""
    if op.is_view:
        return 0
    op_ns, bytes_per_ns, flops_per_ns = CPU_TIMES if is_on_cpu else GPU_TIMES
    moved = int(op.bytes_read + op.bytes_written)
    return op_ns + moved // bytes_per_ns + int(op.flops) // flops_per_ns


def rough_transfer_ns(num_bytes: int) -> int:
    """About how long a push takes."""
    return TRANSFER_NS + num_bytes // LINK_BYTES_PER_NS


def push_lane(num_bytes: int, receiver: int) -> int:
    """Which of its sender's streams carries a tensor.

    Large tensors share one stream, or they would share the bandwidth and all come late; small ones
    have one stream per receiver, so that they overtake large ones.
    """
    return -1 if num_bytes >= COPY_ENGINE_BYTES else receiver


def join_positions(
    problem: Problem, device: I32, orders: list[list[int]], transfers: I64
) -> dict[int, int]:
    """Storage -> position in its device's order before which its last push is joined.

    Args:
        problem: What is run.
        device: Device of each task. int32 `[N]`
        orders: Per device its tasks in order, sources left out.
        transfers: Of `CoreTimeline`. `[X, 6]`

    Raises:
        PlanError: The devices wait for each other.
    """
    if not len(transfers):
        return {}
    clock = _RoughClock(problem, device, orders, transfers)
    clock.run()
    storage_of = problem.core.tasks.carrier_storage.tolist()
    until: dict[int, int] = {}
    for d in range(len(orders)):
        for send, position in _joins(clock, d):
            storage = storage_of[send.carrier]
            until[storage] = max(until.get(storage, 0), position)
    return until


class _Send(NamedTuple):
    carrier: int
    receiver: int
    num_bytes: int
    position: int  # it follows this op of its device; -1: the step's start
    time_ns: int


@dataclass
class _Track:
    """One device: when each op starts, what it sends, and its waits as (time, position)."""

    clock_ns: int = 0
    starts: list[int] = field(default_factory=list)
    sends: list[_Send] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)


class _RoughClock:
    """The step in rough times."""

    def __init__(
        self, problem: Problem, device: I32, orders: list[list[int]], transfers: I64
    ) -> None:
        tasks = problem.core.tasks
        self._problem, self._device, self._orders = problem, device.tolist(), orders
        self._bytes, self._maker = tasks.carrier_bytes.tolist(), tasks.carrier_maker.tolist()
        self._in_ptr, self._in = tasks.in_ptr.tolist(), tasks.in_carrier.tolist()
        self._is_cpu = [device.traits.is_host for device in problem.machine.devices]
        crossing = [(carrier, e) for carrier, _, e, *_ in transfers.tolist()]
        need = _first_needs(problem, orders, set(crossing))
        self._targets: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for carrier, e in sorted(crossing, key=lambda send: (need.get(send, 0), send[1])):
            self._targets[self._maker[carrier]].append((carrier, e))
        self._arrival: dict[tuple[int, int], int] = {}
        self.tracks = [_Track() for _ in orders]
        self.wait_ns: dict[tuple[int, int], int] = {}
        for source in np.flatnonzero(tasks.is_source).tolist():
            self._send(source, -1)

    def run(self) -> None:
        """Let every device go on until all are through."""
        left = sum(map(len, self._orders))
        while left:
            before = left
            for d, order in enumerate(self._orders):
                track = self.tracks[d]
                while len(track.starts) < len(order) and self._step(d, order[len(track.starts)]):
                    left -= 1
            if left == before:
                raise PlanError("The devices wait for each other's tensors. Make the plan again.")

    def _step(self, d: int, task: int) -> bool:
        """Start the next op of a device; False if something it reads was not sent yet."""
        track, position = self.tracks[d], len(self.tracks[d].starts)
        reads = self._in[self._in_ptr[task] : self._in_ptr[task + 1]]
        foreign = [(carrier, d) for carrier in reads if self._device[self._maker[carrier]] != d]
        if any(key not in self._arrival for key in foreign):
            return False
        for key in foreign:
            if key not in self.wait_ns:
                track.clock_ns = max(track.clock_ns, self._arrival[key])
                self.wait_ns[key] = track.clock_ns
                track.waits.append((track.clock_ns, position))
        track.starts.append(track.clock_ns)
        op = self._problem.graph.ops[self._problem.core.tasks.task_op[task]]
        track.clock_ns += rough_op_ns(op, self._is_cpu[d])
        self._send(task, position)
        return True

    def _send(self, task: int, position: int) -> None:
        track = self.tracks[self._device[task]]
        for carrier, e in self._targets.get(task, ()):
            size = self._bytes[carrier]
            self._arrival[carrier, e] = track.clock_ns + rough_transfer_ns(size)
            track.sends.append(_Send(carrier, e, size, position, track.clock_ns))


def _first_needs(
    problem: Problem, orders: list[list[int]], crossing: set[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """How much each receiver has loaded, received and called before it needs what crosses first.

    An op's tensors are sent in this order.
    """
    graph, tasks = problem.graph, problem.core.tasks
    task_op, carrier_of = tasks.task_op.tolist(), tasks.carrier_of
    found: dict[tuple[int, int], int] = {}
    for d, order in enumerate(orders):
        present: set[int] = set()
        for task in order:
            todo = list(reversed(graph.ops[task_op[task]].inputs))
            while todo:
                tensor = todo.pop()
                if tensor in present:
                    continue
                op, send = graph.ops[graph.producer[tensor]], (carrier_of.get(tensor, -1), d)
                if send not in crossing and op.is_view and op.alias_of not in present:
                    todo += [tensor, op.alias_of]
                    continue
                if send in crossing:
                    found[send] = len(present)
                present.add(tensor)
            present.update(graph.ops[task_op[task]].outputs)
    return found


def _joins(clock: _RoughClock, d: int) -> list[tuple[_Send, int]]:
    """Every send of a device with the position before which it is joined."""
    track = clock.tracks[d]
    due = _due(track)
    found = []
    latest: dict[int, int] = {}  # of a lane: joined with what follows there
    for send, due_ns in zip(reversed(track.sends), reversed(due), strict=True):
        own = push_lane(send.num_bytes, send.receiver)
        position = min(latest.get(own, len(track.starts)), bisect_left(track.starts, due_ns))
        wait = clock.wait_ns.get((send.carrier, send.receiver))
        if wait is not None:
            position = min(position, _wait_after(track, send, wait, d))
        latest[own] = position
        found.append((send, max(position, send.position + 1)))
    return found


def _due(track: _Track) -> list[int]:
    """When each send is joined without a wait; never, if it is small."""
    free: dict[int, int] = {}
    found = []
    for send in track.sends:
        if send.num_bytes < JOINED_BYTES:
            found.append(np.iinfo(np.int64).max)
            continue
        own, took = push_lane(send.num_bytes, send.receiver), rough_transfer_ns(send.num_bytes)
        begin = max(send.time_ns, free.get(own, 0))
        free[own] = begin + took
        found.append(begin + PATIENCE * took)
    return found


def _wait_after(track: _Track, send: _Send, wait_ns: int, d: int) -> int:
    """Position of the sender's first wait that comes after a send and after the wait for it."""
    after = (
        bisect_left if d > send.receiver else bisect_right
    )  # of two at once, as in `timed_order`
    first = after(track.waits, wait_ns, key=lambda wait: wait[0])
    first = max(first, bisect_right(track.waits, send.position, key=lambda wait: wait[1]))
    return track.waits[first][1] if first < len(track.waits) else len(track.starts)
