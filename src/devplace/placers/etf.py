"""ETF: earliest task first, aware of memory."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from devplace.placers.evaluate import Evaluator
from devplace.placers.groups import accelerators
from devplace.placers.list_schedule import ListSchedule, upward_rank
from devplace.problem import Placement, Problem

_Entry = tuple[float, int, int]


class _Queues:
    """Ready tasks per device: those whose inputs are there by the time the device is free, by
    priority, and those still waiting for inputs, by that time."""

    def __init__(self, num_devices: int) -> None:
        self.free = [0] * num_devices
        self._waiting: list[list[tuple[int, float, int]]] = [[] for _ in range(num_devices)]
        self._there: list[list[tuple[float, int]]] = [[] for _ in range(num_devices)]

    def add(self, device: int, task: int, ready_ns: int, priority: float) -> None:
        heapq.heappush(self._waiting[device], (ready_ns, -priority, task))

    def head(self, device: int, done: list[bool]) -> _Entry | None:
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


@dataclass(frozen=True)
class Etf:
    """Among all ready ops and devices take the pair that can start first; ties by upward rank.

    Uses the accelerators; a device without room (by the running ledger) is passed over, and when
    no accelerator has room the op goes to the device with the most free memory, the CPU included.
    Transfers wait for their channels.

    Source: Hwang, Chow, Anger, Lee (1989), Scheduling precedence graphs in systems with
    interprocessor communication times, SIAM J. Computing 18(2); memory rule after Jeon et al.
    (2020), Baechi, SoCC, m-ETF. Differs from m-ETF in that memory is a ledger in schedule order.
    """

    name: str = "etf"

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Build one schedule. O(N D log N)."""
        devices = accelerators(problem)
        schedule = ListSchedule(problem, contention=True)
        rank = upward_rank(problem, devices).tolist()
        queues = _Queues(schedule.num_devices)
        done = [False] * schedule.num_tasks
        missing = [0] * schedule.num_tasks
        offers = [0] * schedule.num_tasks

        def offer(task: int) -> None:
            choices = schedule.choices(task, set(devices))
            offers[task] = len(choices)
            for device in choices:
                queues.add(device, task, schedule.ready_ns(task, device), rank[task])

        for task in range(schedule.num_tasks):
            missing[task] = sum(not schedule.is_source[m] for m in schedule.makers(task))
            if not schedule.is_source[task] and missing[task] == 0:
                offer(task)
        while True:
            found = self._next(schedule, queues, done)
            if found is None:
                break
            task, device = found
            if (
                not schedule.has_room(task, device)
                and schedule.group_device[schedule.group[task]] < 0
            ):
                queues.drop(device)
                offers[task] -= 1
                if offers[task] > 0:
                    continue
                device = self._roomiest(schedule, task)
            done[task] = True
            start = max(queues.free[device], schedule.ready_ns(task, device))
            schedule.commit(task, device)
            schedule.finish[task] = start + schedule.duration[task][device]
            queues.free[device] = schedule.finish[task]
            for reader in schedule.readers(task):
                missing[reader] -= 1
                if missing[reader] == 0:
                    offer(reader)
        return schedule.placement()

    @staticmethod
    def _next(schedule: ListSchedule, queues: _Queues, done: list[bool]) -> tuple[int, int] | None:
        Etf._send_home(schedule, queues, done)
        best: tuple[int, float, int, int] | None = None
        for device in range(schedule.num_devices):
            head = queues.head(device, done)
            if head is None:
                continue
            rank, start, task = head
            key = (start, rank, task, device)
            if best is None or key < best:
                best = key
        return None if best is None else (best[2], best[3])

    @staticmethod
    def _send_home(schedule: ListSchedule, queues: _Queues, done: list[bool]) -> None:
        """Move tasks at the head of a queue whose group has gone elsewhere since they came in."""
        for device in range(schedule.num_devices):
            while (head := queues.head(device, done)) is not None:
                rank, _, task = head
                home = schedule.group_device[schedule.group[task]]
                if home in (-1, device):
                    break
                queues.drop(device)
                queues.add(home, task, schedule.ready_ns(task, home), -rank)

    @staticmethod
    def _roomiest(schedule: ListSchedule, task: int) -> int:
        ledger = schedule.ledger
        choices: list[int] = sorted(schedule.allowed[schedule.group[task]])
        free = {d: int(ledger.limit[d] - ledger.used[d]) for d in choices}
        return max(choices, key=lambda d: (free[d], -d))
