"""Earliest task first: the schedule that ETF, m-ETF and m-SCT build."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from devplace.placers.colocation_groups import I32
from devplace.placers.list_schedulers.list_schedule import ListSchedule
from devplace.problem import Problem

Entry = tuple[float, int, int]
"""Minus the priority, start in ns, task."""


class Queues:
    """Ready tasks per device: those whose inputs are there by the time the device is free, by
    priority, and those still waiting for inputs, by that time."""

    def __init__(self, num_devices: int) -> None:
        self.free = [0] * num_devices
        self._waiting: list[list[tuple[int, float, int]]] = [[] for _ in range(num_devices)]
        self._there: list[list[tuple[float, int]]] = [[] for _ in range(num_devices)]

    def add(self, device: int, task: int, ready_ns: int, priority: float) -> None:
        """Offer a task to a device."""
        heapq.heappush(self._waiting[device], (ready_ns, -priority, task))

    def head(self, device: int, done: list[bool]) -> Entry | None:
        """(-priority, start, task) of the task this device would start next."""
        waiting, there = self._waiting[device], self._there[device]
        while waiting and waiting[0][0] <= self.free[device]:
            _, rank, task = heapq.heappop(waiting)
            heapq.heappush(there, (rank, task))
        while there and done[there[0][1]]:
            heapq.heappop(there)
        if there:
            return (there[0][0], self.free[device], there[0][1])
        while waiting and done[waiting[0][2]]:
            heapq.heappop(waiting)
        return (waiting[0][1], waiting[0][0], waiting[0][2]) if waiting else None

    def drop(self, device: int) -> None:
        """Forget the head of a device (it has no room there)."""
        if self._there[device]:
            heapq.heappop(self._there[device])
        else:
            heapq.heappop(self._waiting[device])


class EarliestFirst:
    """Among all ready tasks and devices the pair that can start first, over and over.

    Uses the accelerators; a device without room (by the running ledger) is passed over, and when
    no accelerator has room the task goes to the device with the most free memory, the CPU included.
    Transfers wait for their channels. O(N D log N).

    Args:
        problem: What is placed.
        priority: Of each task; of several that can start at once the largest goes first.
        group: Which tasks are placed together; the colocation groups by default. `[N]`
    """

    def __init__(
        self, problem: Problem, priority: Sequence[float], group: I32 | None = None
    ) -> None:
        self.schedule = ListSchedule(problem, contention=True, group=group)
        self.priority = priority
        self.queues = Queues(self.schedule.num_devices)
        self.done = [False] * self.schedule.num_tasks
        self._among = set(problem.accelerators)
        self._missing = [0] * self.schedule.num_tasks
        self._offers = [0] * self.schedule.num_tasks

    def build(self) -> ListSchedule:
        """Place every task."""
        schedule = self.schedule
        for task in range(schedule.num_tasks):
            self._missing[task] = sum(not schedule.is_source[m] for m in schedule.makers(task))
            if not schedule.is_source[task] and self._missing[task] == 0:
                self.offer(task)
        while (found := self._next()) is not None:
            task, device = found
            if not self.has_room(task, device):
                self.queues.drop(device)
                self._offers[task] -= 1
                if self._offers[task] > 0:
                    continue
                device = self._roomiest(task)
            self.run(task, device)
        return schedule

    def offer(self, task: int) -> None:
        """Put a task that became ready into the queues."""
        choices = self.choices(task)
        self._offers[task] = len(choices)
        for device in choices:
            ready_ns = self.schedule.ready_ns(task, device)
            self.queues.add(device, task, ready_ns, self.priority[task])

    def is_ready(self, task: int) -> bool:
        """Whether all tasks before it are placed."""
        return self._missing[task] == 0

    def choices(self, task: int) -> list[int]:
        """Devices the task may go to."""
        return self.schedule.choices(task, self._among)

    def has_room(self, task: int, device: int) -> bool:
        """Whether the task fits there, or has no choice any more."""
        decided = self.schedule.group_device[self.schedule.group[task]] >= 0
        return decided or self.schedule.has_room(task, device)

    def run(self, task: int, device: int) -> None:
        """Let the device run the task next."""
        schedule, free = self.schedule, self.queues.free
        self.done[task] = True
        start = max(free[device], schedule.ready_ns(task, device))
        schedule.run(task, device, start)
        free[device] = schedule.finish[task]
        for reader in schedule.readers(task):
            self._missing[reader] -= 1
            if self._missing[reader] == 0:
                self.offer(reader)

    def head(self, device: int) -> Entry | None:
        """What the device would start next."""
        return self.queues.head(device, self.done)

    def _next(self) -> tuple[int, int] | None:
        self._send_home()
        best: tuple[int, float, int, int] | None = None
        for device in range(self.schedule.num_devices):
            head = self.head(device)
            if head is None:
                continue
            rank, start, task = head
            key = (start, rank, task, device)
            if best is None or key < best:
                best = key
        return None if best is None else (best[2], best[3])

    def _send_home(self) -> None:
        """Move tasks at the head of a queue whose group has gone elsewhere since they came in."""
        schedule, queues = self.schedule, self.queues
        for device in range(schedule.num_devices):
            while (head := queues.head(device, self.done)) is not None:
                rank, _, task = head
                home = schedule.group_device[schedule.group[task]]
                if home in (-1, device):
                    break
                queues.drop(device)
                queues.add(home, task, schedule.ready_ns(task, home), -rank)

    def _roomiest(self, task: int) -> int:
        ledger = self.schedule.ledger
        choices: list[int] = sorted(self.schedule.allowed[self.schedule.group[task]])
        free = {d: int(ledger.limit[d] - ledger.used[d]) for d in choices}
        return max(choices, key=lambda d: (free[d], -d))
