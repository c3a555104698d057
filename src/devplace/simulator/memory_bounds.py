"""Lower bounds on memory: what ops, groups and the whole step need at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem, Tasks

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Needs:
    """Bytes that are needed whatever the placement.

    Attributes:
        static_bytes: What is in memory when the step begins: sources of each group, and read-only
            sources that only this group reads. `[G]`
        least_bytes: What each group needs on its device: that, or if it is more, what its largest
            op reads, makes and works in at once. `[G]`
        total_bytes: Static bytes of the whole step, each read-only source counted once.
        room_bytes: What a device can hold of it. `[D]`
        capacity_bytes: What all usable devices together can hold.
        allowed: Devices each group may go to and where its static bytes and each of its ops fit.
            `[G, D]`
    """

    static_bytes: I64
    least_bytes: I64
    total_bytes: int
    room_bytes: I64
    capacity_bytes: int
    allowed: Bools

    @property
    def lack(self) -> Literal["", "static", "op", "bound groups"]:
        """Why nothing fits, or empty if that is not proved."""
        if self.total_bytes > self.capacity_bytes:
            return "static"
        if not self.allowed.any(axis=1).all():
            return "op"
        return "bound groups" if self._is_overfull() else ""

    def _is_overfull(self) -> bool:
        """Whether groups that have only some devices to go to are too much for these."""
        for row in np.unique(self.allowed, axis=0):
            inside = ~(self.allowed & ~row[None, :]).any(axis=1)
            room = sum(self.room_bytes[row].tolist())  # limits may be close to the largest int64
            if sum(self.static_bytes[inside].tolist()) > room:
                return True
        return False


def least_needs(problem: Problem) -> Needs:
    """What any placement of this problem needs.

    Complexity: O(N + E) with numpy.
    """
    tasks, wires = problem.core.tasks, problem.core.wires
    static = problem.spaces.groups_sum(permanent_bytes(tasks))
    total = int(static.sum())
    user_group = tasks.group[tasks.const_user]
    for const, size in enumerate(tasks.const_bytes.tolist()):
        users = user_group[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]
        if len(users):
            total += size
            if (users == users[0]).all():
                static[users[0]] += size
    room = wires.limit_bytes - wires.held_bytes
    for d, pool in enumerate(wires.pool.tolist()):
        if pool >= 0:
            room[d] = min(room[d], wires.pool_limit_bytes[pool] - wires.held_bytes[d])
    largest = np.zeros(tasks.num_groups, np.int64)
    np.maximum.at(largest, tasks.group, _op_bytes(tasks))
    least = np.maximum(static, largest)
    allowed = problem.allowed & (least[:, None] <= room[None, :])
    return Needs(static, least, total, np.maximum(room, 0), _capacity(problem), allowed)


def tightest(problem: Problem) -> tuple[int, int, int]:
    """Of what fits nowhere: an op (by index) that alone, or with what must sit with it, needs more
    than any device has that it may go to; the bytes; and the most that such a device can hold."""
    tasks, needs = problem.core.tasks, least_needs(problem)
    group = int(np.flatnonzero(~needs.allowed.any(axis=1))[0])
    members = np.flatnonzero(tasks.group == group)
    alone, needed = _op_bytes(tasks)[members], int(needs.least_bytes[group])
    room = int(needs.room_bytes[problem.allowed[group]].max())
    return int(tasks.task_op[members[alone.argmax()]]), needed, room


def permanent_bytes(tasks: Tasks) -> I64:
    """What each task holds when the step begins: of sources that are replaced, what they hold,
    unless nothing reads their old value. `[N]`"""
    owner = tasks.storage_maker
    is_kept = (np.diff(tasks.out_ptr)[owner] > 0) | (tasks.storage_held > 0)
    permanent = tasks.is_source[owner].astype(bool) & is_kept
    held = np.zeros(tasks.num_tasks, np.int64)
    np.add.at(held, owner[permanent], tasks.storage_bytes[permanent])
    return held


def _op_bytes(tasks: Tasks) -> I64:
    """What each op that runs needs on its device at once: what it reads, makes and works in. `[N]`

    Of tensors that share storage only the largest counts, and what may be computed over its source
    does not.
    """
    need = tasks.workspace_bytes.astype(np.int64).copy()
    fresh = tasks.storage_over < 0
    np.add.at(need, tasks.storage_maker[fresh], tasks.storage_bytes[fresh])
    for const, size in enumerate(tasks.const_bytes.tolist()):
        need[tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]] += size
    reader = np.repeat(np.arange(tasks.num_tasks), np.diff(tasks.in_ptr))
    storage = tasks.carrier_storage[tasks.in_carrier].astype(np.int64)
    size = tasks.carrier_bytes[tasks.in_carrier]
    order = np.lexsort((-size, storage, reader))
    reader, storage, size = reader[order], storage[order], size[order]
    first = np.ones(len(reader), bool)
    first[1:] = (reader[1:] != reader[:-1]) | (storage[1:] != storage[:-1])
    np.add.at(need, reader[first], size[first])
    need[tasks.is_source.astype(bool)] = 0
    return need


def _capacity(problem: Problem) -> int:
    wires = problem.core.wires
    total, pools = 0, wires.pool_limit_bytes.astype(object).copy()
    per_pool = [0] * len(pools)
    for d in problem.usable_devices:
        if wires.pool[d] < 0:
            total += int(wires.limit_bytes[d])
        else:
            per_pool[wires.pool[d]] += int(wires.limit_bytes[d])
    return total + sum(min(int(a), b) for a, b in zip(pools, per_pool, strict=True))
