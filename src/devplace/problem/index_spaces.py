"""Three numberings of one step, and what is known in one said in another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.problem.core import Tasks

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Values = NDArray[Any]


@dataclass(frozen=True, eq=False)
class IndexSpaces:
    """Conversions between ops (of the graph), tasks (ops that run, and sources that are replaced)
    and colocation groups of tasks.

    In shapes `V` is ops, `N` tasks, `G` groups; leading dimensions stay as they are.

    Attributes:
        tasks: Which ops are tasks, and the group of each.
        num_ops: Number of ops, `V`.
        spare_device: Device of ops that no task decides.
    """

    tasks: Tasks
    num_ops: int
    spare_device: int

    def tasks_from_groups(self, values: Values) -> Values:
        """Each task has what its group has. `[.., G]` -> `[.., N]`"""
        return np.ascontiguousarray(values[..., self.tasks.group])

    def groups_from_tasks(self, values: Values) -> Values:
        """Each group has what its first task has. `[N]` -> `[G]`"""
        found = np.zeros(self.tasks.num_groups, values.dtype)
        found[self.tasks.group[::-1]] = values[::-1]
        return found

    def groups_sum(self, values: Values) -> Values:
        """Each group has what its tasks have together. `[N]` -> `[G]`"""
        found = np.zeros(self.tasks.num_groups, values.dtype)
        np.add.at(found, self.tasks.group, values)
        return found

    def tasks_from_ops(self, values: Values) -> Values:
        """Each task has what its op has. `[.., V]` -> `[.., N]`"""
        return np.ascontiguousarray(values[..., self.tasks.task_op])

    def ops_from_tasks(self, values: Values) -> Values:
        """Each op that is a task has what that has, others 0. `[N]` -> `[V]`"""
        found = np.zeros(self.num_ops, values.dtype)
        found[self.tasks.task_op] = values
        return found

    def op_devices(self, task_devices: I32) -> I32:
        """Device of every op: views with their base, read-only sources with their first reader.
        int32 `[N]` -> `[V]`"""
        tasks = self.tasks
        devices = np.full(self.num_ops, self.spare_device, np.int32)
        owned = tasks.op_task >= 0
        devices[owned] = task_devices[tasks.op_task[owned]]
        read = tasks.const_ptr[1:] > tasks.const_ptr[:-1]
        home = np.full(len(tasks.const_op), self.spare_device, np.int32)
        home[read] = task_devices[tasks.const_user[tasks.const_ptr[:-1][read]]]
        const = tasks.op_const >= 0
        devices[const] = home[tasks.op_const[const]]
        return devices

    def op_devices_of_groups(self, group_devices: I32) -> I32:
        """Device of every op from that of every group. int32 `[G]` -> `[V]`"""
        return self.op_devices(self.tasks_from_groups(group_devices))

    def tasks_of(self, ops: Sequence[int]) -> I32:
        """The tasks that ops are, in the same order; a view is the task of its base."""
        return self.tasks.op_task[np.array(ops, np.int64)]

    def order_of(
        self, in_order: Iterable[int], task_devices: I32, num_devices: int
    ) -> tuple[tuple[int, ...], ...]:
        """Per device the ops it runs, as in `Placement.order`, from tasks in order.

        Args:
            in_order: Tasks; sources among them are left out.
            task_devices: int32 `[N]`
            num_devices: Devices of the machine.
        """
        rows: list[list[int]] = [[] for _ in range(num_devices)]
        where, op_of = task_devices.tolist(), self.tasks.task_op.tolist()
        is_source = self.tasks.is_source.tolist()
        for task in in_order:
            if not is_source[task]:
                rows[where[task]].append(op_of[task])
        return tuple(tuple(row) for row in rows)
