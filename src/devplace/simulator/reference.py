"""The simulator in plain Python: slow, obvious, and the specification of the fast one.

Before anything begins, the batch is copied to the devices that read it, one copy after the other;
sources are there when that is over. Rules, in the order they apply at each instant `t`:

1. Ops that end at `t` are handled, larger priority first, then smaller index. An op's end frees
   its workspace and releases what it read; its outputs become ready on its device; each output
   with readers elsewhere is sent, once per reading device, in the order of its readers.
2. Transfers that arrive at `t` are handled: readers there may become ready; the sender's copy is
   released.
3. Every device with a free stream starts its ready ops, larger priority first, then smaller index.
   Where there are turns, a device with one stream starts only the op whose turn it is.
   A start takes memory for outputs and workspace; not for an output computed over a source that
   nothing else reads any more, which is one piece of memory (devices with fixed buffers).
4. Memory is looked at. (So what is freed at an instant can be used again at the same instant.)

Transfers begin and arrive as `devplace.problem.transfers` says. The receive buffer is taken when a
transfer is requested and freed when its last reader there has ended, except on devices that keep
them: there all of a step's receive buffers are held from its start to its end. The sender keeps the
tensor until it has arrived. The transfer's overhead on a compute stream is paid by the next op that
starts there.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from devplace.problem.core import Core
from devplace.problem.transfers import TransferQueues

I64 = NDArray[np.int64]


@dataclass
class CoreTimeline:
    """What one simulation gives, in tasks and carriers.

    Attributes:
        start_ns, finish_ns: Of each task; of a source, when the batch is there. `[N]`
        sequence: Position of each task in the order of starts, over all devices. `[N]`
        makespan_ns: When the last task ends.
        peak_bytes: Largest memory in use per device. `[D]`
        pool_peak_bytes: Largest memory in use per pool. `[P]`
        busy_ns: Time each device spends on ops. `[D]`
        transfers: Rows of carrier, source, destination, request, start, arrival. `[X, 6]`
        memory: Rows of time, device, bytes in use from then on; one row per change. `[M, 3]`
    """

    start_ns: I64
    finish_ns: I64
    sequence: I64
    makespan_ns: int
    peak_bytes: I64
    pool_peak_bytes: I64
    busy_ns: I64
    transfers: I64
    memory: I64


@dataclass
class _State:
    """Everything that changes while the clock runs."""

    core: Core
    device: list[int]
    priority: list[int]
    queues: TransferQueues
    now: int = 0
    ready: list[list[tuple[int, int]]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    due: list[list[int]] = field(default_factory=list)
    debt: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    references: dict[int, int] = field(default_factory=dict)
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    in_place: set[int] = field(default_factory=set)
    events: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    transfers: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)


def simulate_core(
    core: Core, device: NDArray[np.int32], priority: I64, turn: I64 | None = None
) -> CoreTimeline:
    """Run one step in simulated time.

    Args:
        core: Tasks and wires.
        device: Device of each task. int32 `[N]`
        priority: Larger starts first among ready tasks. int64 `[N]`
        turn: If given, devices with one stream run their tasks by falling turn, then rising index,
            and wait for the next where they must. Every task must come after those that it waits
            for. int64 `[N]`

    Complexity: O((N + E) log N) with a large constant: about 5 us per task and edge.
    """
    state = _start(core, device, priority)
    if turn is not None:
        _set_due(state, turn)
    count = len(device)
    start, finish = np.zeros(count, np.int64), np.zeros(count, np.int64)
    sequence = np.zeros(count, np.int64)
    busy = np.zeros(core.num_devices, np.int64)
    peak, pool_peak = np.zeros(core.num_devices, np.int64), np.zeros(_num_pools(core), np.int64)
    history: list[tuple[int, int, int]] = []
    order = sorted(range(count), key=lambda v: (-state.priority[v], v))
    for task in order:
        if core.tasks.is_source[task]:
            start[task] = finish[task] = state.now
            _allocate(state, task)
            _finish(state, task)
    for task in range(count):
        if not core.tasks.is_source[task] and not _num_inputs(core, task):
            _make_ready(state, task)
    started = 0
    while True:
        for d in range(core.num_devices):
            while state.running[d] < core.wires.streams[d]:
                following = _next_task(state, d)
                if following is None:
                    break
                task = following
                start[task] = state.now
                finish[task] = state.now + int(core.wires.duration_ns[task, d]) + state.debt[d]
                busy[d] += finish[task] - start[task]
                sequence[task] = started
                started += 1
                state.debt[d] = 0
                state.running[d] += 1
                _allocate(state, task)
                heapq.heappush(state.events, (int(finish[task]), 0, -state.priority[task], task, 0))
        _look_at_memory(state, peak, pool_peak, history)
        if not state.events:
            break
        state.now = state.events[0][0]
        while state.events and state.events[0][0] == state.now:
            _, kind, _, item, destination = heapq.heappop(state.events)
            if kind == 0:
                state.running[state.device[item]] -= 1
                _finish(state, item)
            else:
                _arrive(state, item, destination)
    _add_kept(state, peak, pool_peak, history)
    return CoreTimeline(
        start_ns=start,
        finish_ns=finish,
        sequence=sequence,
        makespan_ns=int(finish.max(initial=0)),
        peak_bytes=peak,
        pool_peak_bytes=pool_peak,
        busy_ns=busy,
        transfers=np.array(state.transfers, np.int64).reshape(-1, 6),
        memory=np.array(history, np.int64).reshape(-1, 3),
    )


def critical_path_priority(core: Core, device: NDArray[np.int32]) -> I64:
    """Longest time from each task's start to the end of the step, transfers included, without
    any waiting. int64 `[N]`"""
    tasks, wires = core.tasks, core.wires
    length = np.zeros(len(device), np.int64)
    for task in range(len(device) - 1, -1, -1):
        d, tail = device[task], 0
        for carrier in range(tasks.out_ptr[task], tasks.out_ptr[task + 1]):
            for reader in tasks.cons[tasks.cons_ptr[carrier] : tasks.cons_ptr[carrier + 1]]:
                e, way = device[reader], int(length[reader])
                if e != d:
                    way += core.transfers.price(carrier, d, e).way_ns
                tail = max(tail, way)
        length[task] = int(wires.duration_ns[task, d]) + tail
    return length


def _start(core: Core, device: NDArray[np.int32], priority: I64) -> _State:
    queues = TransferQueues(core.transfers)
    state = _State(core, [int(d) for d in device], [int(p) for p in priority], queues)
    count = core.num_devices
    state.ready = [[] for _ in range(count)]
    state.running, state.debt, state.memory = [0] * count, [0] * count, [0] * count
    state.shown = [-1] * count
    state.now = core.batch_ns(device)
    used = set(state.device)
    state.kept = [int(core.wires.held_bytes[d]) if d in used else 0 for d in range(count)]
    state.missing = [_num_inputs(core, task) for task in range(len(device))]
    tasks = core.tasks
    for const, size in enumerate(tasks.const_bytes):
        users = tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]
        for d in {state.device[user] for user in users}:
            state.memory[d] += int(size)
    return state


def _num_inputs(core: Core, task: int) -> int:
    return int(core.tasks.in_ptr[task + 1] - core.tasks.in_ptr[task])


def _num_pools(core: Core) -> int:
    return len(core.wires.pool_limit_bytes)


def _set_due(state: _State, turn: I64) -> None:
    """What devices with one stream have yet to run, the next one last."""
    core = state.core
    state.due = [[] for _ in range(core.num_devices)]
    for task in sorted(range(len(turn)), key=lambda v: (turn[v], -v)):
        if not core.tasks.is_source[task] and core.wires.streams[state.device[task]] == 1:
            state.due[state.device[task]].append(task)


def _next_task(state: _State, d: int) -> int | None:
    """Take the ready task that a device starts next, if there is one."""
    ready = state.ready[d]
    if not ready:
        return None
    if not state.due or state.core.wires.streams[d] != 1:
        return heapq.heappop(ready)[1]
    task = state.due[d][-1]
    entry = (-state.priority[task], task)
    if entry not in ready:
        return None
    ready.remove(entry)
    heapq.heapify(ready)
    return state.due[d].pop()


def _make_ready(state: _State, task: int) -> None:
    heapq.heappush(state.ready[state.device[task]], (-state.priority[task], task))


def _allocate(state: _State, task: int) -> None:
    tasks, d = state.core.tasks, state.device[task]
    for storage in range(tasks.storage_ptr[task], tasks.storage_ptr[task + 1]):
        over = int(tasks.storage_over[storage])
        if over >= 0 and state.core.wires.fixed_buffers[d] and state.references.get(over) == 1:
            state.in_place.add(storage)
        else:
            state.memory[d] += int(tasks.storage_bytes[storage])
    state.memory[d] += int(tasks.workspace_bytes[task])


def _finish(state: _State, task: int) -> None:
    tasks, d = state.core.tasks, state.device[task]
    state.memory[d] -= int(tasks.workspace_bytes[task])
    for index in range(tasks.in_ptr[task], tasks.in_ptr[task + 1]):
        _release(state, int(tasks.in_carrier[index]), d)
    first, last = tasks.storage_ptr[task], tasks.storage_ptr[task + 1]
    for storage in range(first, last):
        if storage in state.in_place:  # takes the place of the source released just now
            state.memory[d] += int(tasks.storage_bytes[storage])
        state.references[storage] = int(tasks.storage_held[storage])
    for carrier in range(tasks.out_ptr[task], tasks.out_ptr[task + 1]):
        storage = int(tasks.carrier_storage[carrier])
        sent: set[int] = set()
        for reader in tasks.cons[tasks.cons_ptr[carrier] : tasks.cons_ptr[carrier + 1]]:
            e = state.device[reader]
            if e == d:
                state.references[storage] += 1
                _one_input_less(state, int(reader))
                continue
            if e not in sent:
                sent.add(e)
                state.references[storage] += 1
                _send(state, carrier, d, e)
            state.copies[carrier, e] += 1
    for storage in range(first, last):
        if state.references[storage] == 0:
            state.memory[d] -= int(tasks.storage_bytes[storage])


def _one_input_less(state: _State, task: int) -> None:
    state.missing[task] -= 1
    if state.missing[task] == 0:
        _make_ready(state, task)


def _send(state: _State, carrier: int, d: int, e: int) -> None:
    price = state.core.transfers.price(carrier, d, e)
    begin = state.queues.send(price, d, e, state.now)
    arrival = begin + price.way_ns
    state.debt[d] += price.send_ns
    if state.core.wires.fixed_buffers[e]:
        state.kept[e] += int(state.core.tasks.carrier_bytes[carrier])
    else:
        state.memory[e] += int(state.core.tasks.carrier_bytes[carrier])
    state.copies[carrier, e] = 0
    state.transfers.append((carrier, d, e, state.now, begin, arrival))
    heapq.heappush(state.events, (arrival, 1, 0, carrier, e))


def _arrive(state: _State, carrier: int, e: int) -> None:
    tasks = state.core.tasks
    d = _home(state, carrier)
    state.debt[e] += state.core.transfers.price(carrier, d, e).receive_ns
    _release(state, carrier, d)
    for reader in tasks.cons[tasks.cons_ptr[carrier] : tasks.cons_ptr[carrier + 1]]:
        if state.device[reader] == e:
            _one_input_less(state, int(reader))


def _home(state: _State, carrier: int) -> int:
    producer = int(np.searchsorted(state.core.tasks.out_ptr, carrier, side="right")) - 1
    return state.device[producer]


def _release(state: _State, carrier: int, d: int) -> None:
    """One reader (or sender) of the carrier's memory on device d is done."""
    tasks = state.core.tasks
    if d == _home(state, carrier):
        storage = int(tasks.carrier_storage[carrier])
        state.references[storage] -= 1
        if state.references[storage] == 0:
            state.memory[d] -= int(tasks.storage_bytes[storage])
        return
    state.copies[carrier, d] -= 1
    if state.copies[carrier, d] == 0 and not state.core.wires.fixed_buffers[d]:
        state.memory[d] -= int(tasks.carrier_bytes[carrier])


def _look_at_memory(
    state: _State, peak: I64, pool_peak: I64, history: list[tuple[int, int, int]]
) -> None:
    pools = [0] * len(pool_peak)
    for d, used in enumerate(state.memory):
        peak[d] = max(int(peak[d]), used)
        if used != state.shown[d]:
            state.shown[d] = used
            history.append((state.now, d, used))
        if state.core.wires.pool[d] >= 0:
            pools[state.core.wires.pool[d]] += used
    for p, used in enumerate(pools):
        pool_peak[p] = max(int(pool_peak[p]), used)


def _add_kept(
    state: _State, peak: I64, pool_peak: I64, history: list[tuple[int, int, int]]
) -> None:
    """What is held from the first instant to the last raises every number alike."""
    for d, kept in enumerate(state.kept):
        peak[d] += kept
        if state.core.wires.pool[d] >= 0:
            pool_peak[state.core.wires.pool[d]] += kept
    history[:] = [(when, d, used + state.kept[d]) for when, d, used in history]
