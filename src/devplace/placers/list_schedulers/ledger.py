"""Memory in use while a schedule is being built, op by op."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem

I32 = NDArray[np.int32]


class MemoryLedger:
    """Bytes in use per device in the order ops are scheduled.

    A group's sources are charged when its device is decided; an op's outputs when it is scheduled,
    until all their readers are scheduled; a copy on another device likewise, unless receive buffers
    are kept there. This follows the schedule, not the clock: the simulator has the last word.

    Args:
        problem: What is placed.
        group: Which tasks are placed together; the colocation groups by default. `[N]`
    """

    def __init__(self, problem: Problem, group: I32 | None = None) -> None:
        tasks = problem.core.tasks
        self._tasks = tasks
        wires = problem.core.wires
        self.limit = (wires.limit_bytes - wires.held_bytes).tolist()
        self.used = [0] * len(self.limit)
        self._frees = [d for d, keeps in enumerate(wires.fixed_buffers.tolist()) if not keeps]
        self._out_ptr, self._cons_ptr = tasks.out_ptr.tolist(), tasks.cons_ptr.tolist()
        self._in_ptr, self._in = tasks.in_ptr.tolist(), tasks.in_carrier.tolist()
        self._size = tasks.carrier_bytes.tolist()
        self._storage = tasks.carrier_storage.tolist()
        self._storage_bytes = tasks.storage_bytes.tolist()
        self._storage_ptr = tasks.storage_ptr.tolist()
        self._held = tasks.storage_held.tolist()
        readers = np.diff(tasks.cons_ptr)
        pending = np.zeros(len(tasks.storage_bytes), np.int64)
        np.add.at(pending, tasks.carrier_storage, readers)
        self._pending = pending.tolist()
        self._home = [-1] * len(self._storage_bytes)
        self._copies: dict[tuple[int, int], int] = {}
        self._left = readers.tolist()
        self.group_bytes = self._source_bytes(tasks.group if group is None else group)

    def _source_bytes(self, group: I32) -> list[int]:
        tasks = self._tasks
        total = [0] * (int(group.max(initial=-1)) + 1)
        for task in np.flatnonzero(tasks.is_source):
            for storage in range(tasks.storage_ptr[task], tasks.storage_ptr[task + 1]):
                total[group[task]] += int(tasks.storage_bytes[storage])
        return total

    def need(self, task: int, device: int) -> int:
        """Bytes that scheduling `task` on `device` takes at once."""
        need = int(self._tasks.workspace_bytes[task])
        for storage in range(self._storage_ptr[task], self._storage_ptr[task + 1]):
            need += self._storage_bytes[storage]
        for index in range(self._in_ptr[task], self._in_ptr[task + 1]):
            carrier = self._in[index]
            home = self._home[self._storage[carrier]]
            if home not in (-1, device) and (carrier, device) not in self._copies:
                need += self._size[carrier]
        return need

    def has_room(self, task: int, device: int, extra: int = 0) -> bool:
        """Whether `task` (and `extra` bytes) still fits on `device`."""
        free: int = self.limit[device] - self.used[device]
        return extra + self.need(task, device) <= free

    def decide_group(self, group: int, device: int) -> None:
        """Charge the sources of a group to its device."""
        self.used[device] += self.group_bytes[group]

    def add_source(self, task: int, device: int) -> None:
        """Note where a source's storages are (already charged with the group)."""
        for storage in range(self._storage_ptr[task], self._storage_ptr[task + 1]):
            self._home[storage] = device

    def schedule(self, task: int, device: int) -> None:
        """Charge outputs and copies; release what this op was the last to read."""
        for storage in range(self._storage_ptr[task], self._storage_ptr[task + 1]):
            self._home[storage] = device
            if self._pending[storage] or self._held[storage]:
                self.used[device] += self._storage_bytes[storage]
        for index in range(self._in_ptr[task], self._in_ptr[task + 1]):
            self._read(self._in[index], device)

    def _read(self, carrier: int, device: int) -> None:
        storage = self._storage[carrier]
        home = self._home[storage]
        if home not in (-1, device) and (carrier, device) not in self._copies:
            self._copies[carrier, device] = self._size[carrier]
            self.used[device] += self._size[carrier]
        self._left[carrier] -= 1
        if self._left[carrier] == 0:
            for other in self._frees:
                self.used[other] -= self._copies.pop((carrier, other), 0)
        self._pending[storage] -= 1
        if self._pending[storage] == 0 and not self._held[storage] and home >= 0:
            self.used[home] -= self._storage_bytes[storage]
