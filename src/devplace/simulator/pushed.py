"""How long a tensor that a GPU pushes keeps its memory there.

The executor has no events between ops: it lets the ops wait for ("joins") a push before some op,
and from then on the memory is free again. `run/linear.py` chooses where; this is the same rule in
simulated time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Core
from devplace.simulator.reference import CoreTimeline

I32 = NDArray[np.int32]

PATIENCE = 2
JOINED_BYTES = 2**20
# From here on the pushes of a device share one stream, whoever they go to.
COPY_ENGINE_BYTES = 4 * 2**20


def join_positions(
    core: Core, device: I32, run: CoreTimeline, orders: list[list[int]]
) -> dict[int, int]:
    """Storage -> position in its device's order before which its last push is joined.

    Args:
        core: What was simulated.
        device: Device of each task. int32 `[N]`
        run: Its simulation.
        orders: Of `device_orders`.
    """
    transfers = run.transfers.tolist()
    waits = _first_reads(core, device, run)
    until: dict[int, int] = {}
    for d, order in enumerate(orders):
        sends = [row for row in transfers if row[1] == d]
        starts = run.start_ns[order].tolist()
        received = sorted(waits[row[0], d] for row in transfers if row[2] == d)
        for (carrier, *_), position in _joins(core, sends, waits, received, starts):
            storage = int(core.tasks.carrier_storage[carrier])
            until[storage] = max(until.get(storage, 0), position)
    return until


def _joins(
    core: Core,
    sends: list[list[int]],
    waits: dict[tuple[int, int], int],
    received: list[int],
    starts: list[int],
) -> list[tuple[list[int], int]]:
    """Every send of a device with the position before which it is joined."""
    lanes: dict[int, list[list[int]]] = defaultdict(list)
    for row in sends:
        is_large = core.tasks.carrier_bytes[row[0]] >= COPY_ENGINE_BYTES
        lanes[-1 if is_large else row[2]].append(row)
    found = []
    for lane in lanes.values():
        latest = len(starts)  # what a later push of the lane is joined before is over for all
        for row in reversed(lane):
            carrier, _, e, request, begin, arrival = row
            # the first wait that comes after this one's own wait, and after it was sent
            place = bisect_left(received, max(waits[carrier, e] + 1, request))
            if place < len(received):
                latest = min(latest, bisect_left(starts, received[place]))
            if core.tasks.carrier_bytes[carrier] >= JOINED_BYTES:
                latest = min(latest, bisect_left(starts, begin + PATIENCE * (arrival - begin)))
            found.append((row, latest))
    return found


def _first_reads(core: Core, device: I32, run: CoreTimeline) -> dict[tuple[int, int], int]:
    """When each carrier that crosses is read first by each device that receives it, ns."""
    tasks = core.tasks
    found: dict[tuple[int, int], int] = {}
    for carrier, _, e, *_ in run.transfers.tolist():
        readers = tasks.cons[tasks.cons_ptr[carrier] : tasks.cons_ptr[carrier + 1]]
        found[carrier, e] = int(run.start_ns[readers[device[readers] == e]].min())
    return found
