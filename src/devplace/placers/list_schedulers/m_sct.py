"""m-SCT: small communication times under memory limits, as in Baechi."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from devplace.placers.colocation_groups import I32, mean_duration_ns
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.extras import missing
from devplace.placers.list_schedulers.coplace import coplaced
from devplace.placers.list_schedulers.earliest import EarliestFirst, Entry
from devplace.placers.list_schedulers.favourites import I64, TaskDag, favourite_children
from devplace.placers.list_schedulers.list_schedule import best_of, mean_transfer_ns
from devplace.placers.list_schedulers.m_etf import in_order
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class MSct:
    """`m-etf`, but a device waits for the favourite child of the op it ran last.

    A device whose last op has a favourite child that is ready, and could start nowhere earlier,
    takes nothing else until then, except an urgent op: one whose inputs would by then be there on
    every device.

    Source: Jeon et al. (2020), Baechi: fast device placement of machine learning graphs, SoCC, and
    its released code, after Hanen and Munier (1995), An approximation algorithm for scheduling
    dependent tasks on m processors with small communication delays. The linear program is solved by
    HiGHS instead of MOSEK, and in parts (see `favourite_children`), so that its time grows with the
    number of parts; sources have no part in it; of urgent ops only the first is looked at. Else it
    differs from the paper as `m-etf` does.

    Attributes:
        threshold: Edges with a value below it in the linear program are favourites. The released
            code's 0.1 by default.
        most: Ops per linear program, after chains are joined.
        coplace: Keep ops together as `coplaced` tells.
    """

    name: str = "m-sct"
    threshold: float = 0.1
    most: int = 2000
    coplace: bool = True

    def supports(self, problem: Problem) -> str:
        """With HiGHS installed."""
        return missing("highspy", "highspy", "lp")

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Solve the linear programs and build one schedule."""
        favourite = favourite_children(task_dag(problem), self.threshold, self.most)
        group = coplaced(problem) if self.coplace else None
        return best_of([_Favouring(problem, favourite, group).build()], evaluate)


def task_dag(problem: Problem) -> TaskDag:
    """Tasks with mean times, and between them mean transfer times; sources make no edges."""
    tasks = problem.core.tasks
    devices = problem.accelerators
    carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
    src, dst = tasks.carrier_maker[carrier], tasks.cons.astype(np.int64)
    made = tasks.is_source[src] == 0
    pairs, index = np.unique(src[made] * tasks.num_tasks + dst[made], return_inverse=True)
    transfer = mean_transfer_ns(problem, devices)[carrier[made]]
    cost = np.bincount(index, transfer, len(pairs)).astype(np.float64)
    count = max(1, tasks.num_tasks)
    return TaskDag(mean_duration_ns(problem), pairs // count, pairs % count, cost)


class _Favouring(EarliestFirst):
    """Earliest first with favourite children."""

    def __init__(self, problem: Problem, favourite: I64, group: I32 | None) -> None:
        super().__init__(problem, in_order(problem), group)
        self._favourite = favourite.tolist()
        self._last = [-1] * self.schedule.num_devices
        self._until = [0] * self.schedule.num_devices
        self._urgent: list[tuple[int, int]] = []

    def offer(self, task: int) -> None:
        """Also note when the task becomes urgent."""
        super().offer(task)
        choices = self.choices(task)
        ready_ns = max(self.schedule.ready_ns(task, device) for device in choices)
        heapq.heappush(self._urgent, (ready_ns, task))

    def run(self, task: int, device: int) -> None:
        """Also remember what ran last, and that the device waited."""
        self._last[device] = task
        self.queues.free[device] = max(self.queues.free[device], self._until[device])
        super().run(task, device)

    def head(self, device: int) -> Entry | None:
        """The favourite child or an urgent op if the device waits, else as without favourites."""
        self._until[device] = 0
        child = self._awaited(device)
        if child < 0:
            return super().head(device)
        task, start = child, self._start(child, device)
        urgent = self._first_urgent(device)
        if urgent is not None and urgent[0] <= start:
            start, task = urgent
        self._until[device] = start
        return (-self.priority[task], start, task)

    def _awaited(self, device: int) -> int:
        """The favourite child this device waits for, or -1."""
        child = self._favourite[self._last[device]] if self._last[device] >= 0 else -1
        if child < 0 or self.done[child] or not self.is_ready(child):
            return -1
        choices = self.choices(child)
        if device not in choices or not self.has_room(child, device):
            return -1
        start = self._start(child, device)
        return child if all(start <= self._start(child, other) for other in choices) else -1

    def _start(self, task: int, device: int) -> int:
        return max(self.queues.free[device], self.schedule.ready_ns(task, device))

    def _first_urgent(self, device: int) -> tuple[int, int] | None:
        """Start on this device and task of the first urgent op, if it may go there."""
        while self._urgent and self.done[self._urgent[0][1]]:
            heapq.heappop(self._urgent)
        if not self._urgent:
            return None
        urgent_ns, task = self._urgent[0]
        choices = self.choices(task)
        if device not in choices or not self.has_room(task, device):
            return None
        available = max(self.queues.free[other] for other in choices)
        return (max(urgent_ns, available), task)
