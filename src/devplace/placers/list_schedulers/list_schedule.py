"""A schedule under construction: what list schedulers such as HEFT and ETF share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from devplace.placers.colocation_groups import legal
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.list_schedulers.ledger import MemoryLedger
from devplace.problem import Placement, Problem
from devplace.problem.transfers import TransferQueues

F64 = NDArray[np.float64]


class ListSchedule:
    """Tasks placed so far, when they end, and what has been sent where.

    A source whose group is undecided goes to the device of the first op that reads it.

    Args:
        problem: What is placed.
        contention: Whether transfers wait for their channels.
        group: Which tasks are placed together: unions of colocation groups that some device can
            run; the colocation groups by default. `[N]`
    """

    def __init__(
        self, problem: Problem, contention: bool, group: NDArray[np.int32] | None = None
    ) -> None:
        tasks, wires = problem.core.tasks, problem.core.wires
        self.problem = problem
        joined = tasks.group if group is None else group
        self.ledger = MemoryLedger(problem, joined)
        self.num_tasks = tasks.num_tasks
        self.num_devices = problem.core.num_devices
        self.is_source = tasks.is_source.tolist()
        self.group = joined.tolist()
        self.duration = wires.duration_ns.tolist()
        self.finish = [0] * self.num_tasks
        self._runs: list[tuple[int, int, int]] = []  # start, finish, task; in order of decisions
        self.allowed = _allowed(problem, joined)
        self.group_device = [next(iter(a)) if len(a) == 1 else -1 for a in self.allowed]
        self._in_ptr, self._in = tasks.in_ptr.tolist(), tasks.in_carrier.tolist()
        self._out_ptr = tasks.out_ptr.tolist()
        self._cons_ptr, self._cons = tasks.cons_ptr.tolist(), tasks.cons.tolist()
        self._maker: list[int] = tasks.carrier_maker.tolist()
        self._transfers = wires.transfers
        self._queues = TransferQueues(wires.transfers) if contention else None
        self._arrival: dict[tuple[int, int], int] = {}
        self._charged = [False] * len(self.allowed)
        for decided, device in enumerate(self.group_device):
            if device >= 0:
                self._charge(decided, device)

    def makers(self, task: int) -> list[int]:
        """Tasks this one reads from, with repeats."""
        return [self._maker[c] for c in self._in[self._in_ptr[task] : self._in_ptr[task + 1]]]

    def readers(self, task: int) -> Iterator[int]:
        """Tasks that read this one's outputs, once per tensor read."""
        first, last = self._out_ptr[task], self._out_ptr[task + 1]
        return iter(self._cons[self._cons_ptr[first] : self._cons_ptr[last]])

    def choices(self, task: int, among: set[int]) -> list[int]:
        """Devices the task may go to: where its group is, else the allowed ones of `among`, else
        any allowed."""
        group = self.group[task]
        if self.group_device[group] >= 0:
            return [self.group_device[group]]
        return sorted(self.allowed[group] & among) or sorted(self.allowed[group])

    def ready_ns(self, task: int, device: int) -> int:
        """When all inputs of the task can be on the device."""
        carriers = self._in[self._in_ptr[task] : self._in_ptr[task + 1]]
        return max((self._arrives(carrier, device) for carrier in carriers), default=0)

    def _arrives(self, carrier: int, device: int) -> int:
        maker = self._maker[carrier]
        home = self.group_device[self.group[maker]]
        if home in (-1, device):
            return self.finish[maker]
        known = self._arrival.get((carrier, device))
        if known is not None:
            return known
        price = self._transfers.price(carrier, home, device)
        begin = self.finish[maker]
        if self._queues is not None:
            begin = self._queues.begins_ns(price, home, device, begin)
        return begin + price.way_ns

    def source_bytes(self, task: int, device: int) -> int:
        """Bytes of sources that would move in with the task: its group's, and undecided inputs'."""
        groups = {self.group[task], *(self.group[maker] for maker in self.makers(task))}
        return sum(self.ledger.group_bytes[g] for g in groups if self.group_device[g] < 0)

    def has_room(self, task: int, device: int) -> bool:
        """Whether the task fits there, by the ledger."""
        return self.ledger.has_room(task, device, self.source_bytes(task, device))

    def commit(self, task: int, device: int) -> None:
        """Place the task: decide groups, send what it needs."""
        self._decide(self.group[task], device)
        for c in self._in[self._in_ptr[task] : self._in_ptr[task + 1]]:
            maker = self._maker[c]
            if self.group_device[self.group[maker]] < 0:
                self._decide(self.group[maker], device)
            if self.is_source[maker]:
                self.ledger.add_source(maker, self.group_device[self.group[maker]])
            self._send(c, maker, device)
        self.ledger.schedule(task, device)

    def run(self, task: int, device: int, start_ns: int) -> None:
        """Place the task, and note when it runs."""
        self.commit(task, device)
        self.finish[task] = start_ns + self.duration[task][device]
        self._runs.append((start_ns, self.finish[task], task))

    def _send(self, carrier: int, maker: int, device: int) -> None:
        home = self.group_device[self.group[maker]]
        if home == device or (carrier, device) in self._arrival:
            return
        price = self._transfers.price(carrier, home, device)
        begin = self.finish[maker]
        if self._queues is not None:
            begin = self._queues.send(price, home, device, begin)
        self._arrival[carrier, device] = begin + price.way_ns

    def _decide(self, group: int, device: int) -> None:
        if self.group_device[group] < 0:
            self.group_device[group] = device
        if not self._charged[group]:
            self._charge(group, self.group_device[group])

    def _charge(self, group: int, device: int) -> None:
        self._charged[group] = True
        self.ledger.decide_group(group, device)

    def placement(self) -> Placement:
        """The finished placement; groups nobody decided go where they are allowed."""
        default = self.problem.usable_devices[0]
        wish = np.full(self.problem.core.tasks.num_groups, default, np.int32)
        for own, group in zip(self.problem.core.tasks.group, self.group, strict=True):
            wish[own] = self.group_device[group] if self.group_device[group] >= 0 else default
        return Placement(self.problem.spaces.op_devices_of_groups(legal(self.problem, wish)))

    def by_start(self) -> Placement:
        """The finished placement; of ready tasks the one that the schedule starts first goes first.

        Only of a schedule all of whose tasks have been `run`.
        """
        rank = np.zeros(self.num_tasks, np.int64)
        runs = self._sorted_runs()
        rank[runs] = np.arange(len(runs), 0, -1)
        return Placement(self.placement().devices, self.problem.spaces.ops_from_tasks(rank))

    def in_order(self) -> Placement:
        """The same, and every device keeps to the schedule's order, idle where that has it wait."""
        listed = self.by_start()
        device = self.problem.task_devices(listed)
        order = self.problem.spaces.order_of(self._sorted_runs(), device, self.num_devices)
        return Placement(listed.devices, listed.priority, order)

    def _sorted_runs(self) -> list[int]:
        """Tasks by start.

        Of those that start together the shorter comes first, then the one decided first: so each
        comes behind what it reads, also where tasks take no time.
        """
        order = sorted(range(len(self._runs)), key=lambda k: (*self._runs[k][:2], k))
        return [self._runs[k][2] for k in order]


def best_of(schedules: Sequence[ListSchedule], evaluate: Evaluator) -> Placement:
    """The best in simulation of what finished schedules may mean.

    Simulated are, as far as the budget goes, three placements of each: in critical-path order, by
    its start times, and in its own order, where devices may wait. The first of equals is taken, so
    the schedule's own order only where it is shorter than ready tasks make it by priorities.
    """
    kinds = (ListSchedule.placement, ListSchedule.by_start, ListSchedule.in_order)
    tried = (kind(schedule) for kind in kinds for schedule in schedules)
    return min(tried, key=lambda placement: evaluate(placement).key)


def _allowed(problem: Problem, group: NDArray[np.int32]) -> list[set[int]]:
    """Devices that all tasks of a group may go to."""
    allowed = np.ones((int(group.max(initial=-1)) + 1, len(problem.machine.devices)), bool)
    np.logical_and.at(allowed, group, problem.allowed[problem.core.tasks.group])
    return [set(np.flatnonzero(row).tolist()) for row in allowed]


def mean_transfer_ns(problem: Problem, devices: list[int]) -> F64:
    """Mean time each carrier takes between two of `devices`, 0 within one. `[T]`"""
    mean = np.zeros(len(problem.core.tasks.carrier_bytes))
    for d in devices:
        for e in devices:
            if d != e:
                mean += problem.core.transfers.way_ns(d, e)
    return mean / max(1, len(devices) ** 2)


def upward_rank(problem: Problem, devices: list[int]) -> F64:
    """HEFT's upward rank: mean time of the op, plus the longest mean transfer + rank behind it.

    Source: Topcuoglu, Hariri, Wu (2002), Performance-effective and low-complexity task scheduling
    for heterogeneous computing, IEEE TPDS 13(3), equation 6.
    """
    tasks, wires = problem.core.tasks, problem.core.wires
    duration = wires.duration_ns[:, devices].mean(axis=1).tolist()
    transfer = mean_transfer_ns(problem, devices).tolist()
    out_ptr, cons_ptr = tasks.out_ptr.tolist(), tasks.cons_ptr.tolist()
    cons = tasks.cons.tolist()
    rank = [0.0] * tasks.num_tasks
    for task in range(tasks.num_tasks - 1, -1, -1):
        tail = 0.0
        for carrier in range(out_ptr[task], out_ptr[task + 1]):
            for reader in cons[cons_ptr[carrier] : cons_ptr[carrier + 1]]:
                tail = max(tail, transfer[carrier] + rank[reader])
        rank[task] = duration[task] + tail
    return np.array(rank)
