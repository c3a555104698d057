"""Price of copying the batch to its devices, which every step does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from devplace.cost.table import transfer_times
from devplace.machine import Machine

I64 = NDArray[np.int64]


def copy_times(num_bytes: I64, machine: Machine, home: str = "") -> I64:
    """Time to copy inputs of a step to each device, ns. `[K, D]`

    A batch lies in host memory, so a copy takes the fastest link from a CPU device, its latency
    included. A CPU device gets a copy as well, as fast as one from another CPU device, but without
    the latency: nobody is woken for it. Where the machine has no such link, and on the device where
    the batch lies, it is taken for free.

    Args:
        num_bytes: Of each input. `[K]`
        machine: Where the step runs.
        home: Name of the device on which the batch lies; default: the host.
    """
    names = machine.device_names
    hosts = [device.name for device in machine.devices if device.traits.is_host]
    homes = [home] if home in names else hosts
    times = np.zeros((len(num_bytes), len(names)), np.int64)
    for column, name in enumerate(names):
        if name == home:
            continue
        is_within_host = name in hosts and homes == hosts
        links = [machine.path(start, name) for start in homes if start != name]
        ways = [
            transfer_times(num_bytes, link) + (0 if is_within_host else link.latency_ns)
            for link in links
            if link
        ]
        if ways:
            times[:, column] = np.min(ways, axis=0)
    return times
