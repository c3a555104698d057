"""HEFT: heterogeneous earliest finish time, with insertion."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.list_schedulers.list_schedule import ListSchedule, best_of, upward_rank
from devplace.problem import Placement, Problem


class IdleTime:
    """Idle intervals of one device, for insertion."""

    def __init__(self, smallest_ns: int) -> None:
        self._smallest = max(1, smallest_ns)
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._free_from = 0

    def earliest(self, ready_ns: int, duration_ns: int) -> int:
        """Earliest start not before `ready_ns` of an interval of this length."""
        first = bisect_right(self._ends, ready_ns)
        for k in range(first, len(self._ends)):
            start = max(ready_ns, self._begins[k])
            if start + duration_ns <= self._ends[k]:
                return start
        return max(ready_ns, self._free_from)

    def take(self, start_ns: int, duration_ns: int) -> None:
        """Mark an interval given by `earliest` as busy."""
        end = start_ns + duration_ns
        if start_ns >= self._free_from:
            self._keep(len(self._ends), self._free_from, start_ns)
            self._free_from = end
            return
        k = bisect_right(self._ends, start_ns)
        begin, last = self._begins.pop(k), self._ends.pop(k)
        k = self._keep(k, begin, start_ns)
        self._keep(k, end, last)

    def _keep(self, k: int, begin: int, end: int) -> int:
        if end - begin < self._smallest:
            return k
        self._begins.insert(k, begin)
        self._ends.insert(k, end)
        return k + 1


@dataclass(frozen=True)
class Heft:
    """Ops by decreasing upward rank, each to the device where it ends first.

    Devices without room (by the running ledger) are passed over. Differs from the paper in that
    colocation groups are kept, that a parameter goes to the first device that reads it, and that
    two schedules are built, one with transfers that never wait (the paper's machine) and one where
    they queue for their channels. Of each also two other orders than its own (the paper's) are
    simulated, six in all; the best is returned (`best_of`).

    Source: Topcuoglu, Hariri, Wu (2002), IEEE TPDS 13(3), 260-274, figure 2.

    Attributes:
        contention: Whether transfers queue, for each schedule to build.
    """

    name: str = "heft"
    contention: tuple[bool, ...] = (False, True)

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Build the schedules. O(N D (degree + idle intervals)) each."""
        schedules = [self.build(problem, contention) for contention in self.contention]
        return best_of(schedules, evaluate)

    def build(self, problem: Problem, contention: bool) -> ListSchedule:
        """One schedule, whose transfers wait for their channels or not."""
        devices = list(problem.usable_devices)
        schedule = ListSchedule(problem, contention)
        rank = upward_rank(problem, devices)
        # ties must keep topological order, also among ops that take no time
        order = np.lexsort((np.arange(len(rank)), -rank)).tolist()
        durations = problem.core.wires.duration_ns
        smallest = int(durations[durations > 0].min()) if (durations > 0).any() else 1
        idle = [IdleTime(smallest) for _ in range(schedule.num_devices)]
        for task in order:
            if not schedule.is_source[task]:
                self._place(schedule, idle, task, set(devices))
        return schedule

    def _place(
        self, schedule: ListSchedule, idle: list[IdleTime], task: int, devices: set[int]
    ) -> None:
        choices = schedule.choices(task, devices)
        with_room = [d for d in choices if schedule.has_room(task, d)] or choices
        best: tuple[int, int, int] | None = None
        for device in with_room:
            duration = schedule.duration[task][device]
            start = idle[device].earliest(schedule.ready_ns(task, device), duration)
            if best is None or start + duration < best[0]:
                best = (start + duration, start, device)
        assert best is not None
        finish, start, device = best
        schedule.run(task, device, start)
        idle[device].take(start, finish - start)
