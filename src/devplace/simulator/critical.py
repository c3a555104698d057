"""The critical path of a simulated step."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Core
from devplace.simulator.reference import CoreTimeline

I32 = NDArray[np.int32]


def device_orders(core: Core, device: I32, run: CoreTimeline) -> list[list[int]]:
    """Tasks of each device in the order they were started, sources left out."""
    rows: list[list[int]] = [[] for _ in range(core.num_devices)]
    source = core.tasks.is_source.tolist()
    where = device.tolist()
    for task in np.argsort(run.sequence, kind="stable").tolist():
        if not source[task]:
            rows[where[task]].append(task)
    return rows


def critical_tasks(core: Core, device: I32, run: CoreTimeline) -> list[int]:
    """The chain of tasks that decides the step time, last first.

    Walks back from the task that ends last, each time to what made it wait: the task before it on
    its device, or the input that came last (through a transfer or not).

    Args:
        core: What was simulated.
        device: Device of each task. int32 `[N]`
        run: Its simulation.
    """
    tasks = core.tasks
    if not len(run.finish_ns) or bool(tasks.is_source.all()):
        return []
    maker = tasks.carrier_maker.tolist()
    before = _waited_for(core, device, run)
    arrival = {(x, e): t for x, _, e, _, _, t in run.transfers.tolist()}
    in_ptr, in_carrier = tasks.in_ptr.tolist(), tasks.in_carrier.tolist()
    finish, where = run.finish_ns.tolist(), device.tolist()
    work = np.flatnonzero(tasks.is_source == 0)
    task = int(work[run.finish_ns[work].argmax()])
    chain = [task]
    while True:
        best = before.get(task, -1)
        when = finish[best] if best >= 0 else -1
        for carrier in in_carrier[in_ptr[task] : in_ptr[task + 1]]:
            ready = arrival.get((carrier, where[task]), finish[maker[carrier]])
            if ready > when:
                best, when = maker[carrier], ready
        if best < 0 or tasks.is_source[best]:
            return chain
        task = best
        chain.append(task)


def _waited_for(core: Core, device: I32, run: CoreTimeline) -> dict[int, int]:
    """Task -> the task of its device that ended last before it started."""
    before: dict[int, int] = {}
    start, finish = run.start_ns.tolist(), run.finish_ns.tolist()
    for d, row in enumerate(device_orders(core, device, run)):
        if core.wires.streams[d] == 1:
            before.update(zip(row[1:], row, strict=False))
            continue
        ended: list[tuple[int, int, int]] = []
        for place, task in enumerate(row):
            fitting = bisect.bisect_right(ended, (start[task], place, 0))
            if fitting:
                before[task] = ended[fitting - 1][2]
            bisect.insort(ended, (finish[task], place, task))
    return before
