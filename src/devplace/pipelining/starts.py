"""Simple initial placements for a max-load search."""

from __future__ import annotations

import numpy as np

from devplace.pipelining.items import Items
from devplace.pipelining.load_problem import I32


def simple_starts(items: Items) -> list[I32]:
    """Equal shares of the order by count and by work, and heaviest items first."""
    return [
        even_split(items, by_work=False),
        even_split(items, by_work=True),
        heaviest_first(items),
    ]


def even_split(items: Items, by_work: bool) -> I32:
    """Runs of the order of equal length or work on the accelerators; the rest on a CPU.

    By length this is how people split a network by hand: as many layers for each device.
    """
    k = items.num_accelerators
    device = np.full(items.num_items, k, np.int32)
    able = items.order[items.can_accelerate[items.order] > 0] if k else items.order[:0]
    share = items.accelerator_ps[able] if by_work else np.ones(len(able), np.int64)
    before = np.cumsum(share) - share // 2
    total = max(1, int(share.sum()))
    device[able] = np.minimum(before.astype(float) * k / total, max(0, k - 1)).astype(np.int32)
    return _on_devices(items, device)


def heaviest_first(items: Items) -> I32:
    """Heaviest items first, each where the load after it is smallest; moves are ignored."""
    k = items.num_accelerators
    load = [0] * items.num_devices
    free = [items.memory_bytes] * k
    device = np.zeros(items.num_items, np.int32)
    for i in np.lexsort((-items.size_bytes, -items.accelerator_ps)).tolist():
        size = int(items.size_bytes[i])
        options = [
            (load[d] + int((items.accelerator_ps if d < k else items.cpu_ps)[i]), d)
            for d in range(items.num_devices)
            if d >= k or (items.can_accelerate[i] and free[d] >= size)
        ]
        if not options:  # nowhere: the emptiest accelerator, for the search to repair
            options = [(load[d], d) for d in range(k)]
        after, d = min(options)
        load[d] = after
        device[i] = d
        if d < k:
            free[d] -= size
    return device


def _on_devices(items: Items, device: I32) -> I32:
    """CPU items on a CPU where there is one; without one all stay on accelerators."""
    return np.minimum(device, items.num_devices - 1).astype(np.int32)
