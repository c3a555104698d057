"""A step to place as a max-load problem: tasks as nodes, prices of its links as edge costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.pipelining.load_problem import I32, I64, LoadProblem
from devplace.pipelining.step_classes import step_classes
from devplace.pipelining.step_loads import StepPrices
from devplace.problem import Problem
from devplace.simulator.memory_bounds import permanent_bytes
from devplace.units import NS_PER_S

PS_PER_NS = 1000
_MAX_PS = 2**58
_MAX_BYTES = 2**57


@dataclass(frozen=True, eq=False)
class StepProblem:
    """A step whose largest load is to be small.

    A max-load problem has equal accelerators, equal CPUs and one price for a tensor on all links.
    Where the machine is like that, its value is the step's. Elsewhere `cheapest` is a relaxation,
    whose bound holds, and `dearest` a model to start from.

    Attributes:
        problem: What is placed.
        classes: Class of each task, if not those of `step_classes`. `[N]`

    Raises:
        ProblemError: Times or sizes that are too large to be added up in ps or with shares.
    """

    problem: Problem
    classes: I32 | None = None

    def __post_init__(self) -> None:
        tasks, wires = self.problem.core.tasks, self.problem.core.wires
        dearest = self.prices.transfer_ns.max(axis=0).sum(dtype=float)
        total_ps = (wires.duration_ns.max(axis=1).sum(dtype=float) + dearest) * PS_PER_NS
        if total_ps >= _MAX_PS:
            raise ProblemError(
                f"Loads of a full pipeline are taken of times that add up to less than "
                f"{_MAX_PS / PS_PER_NS / NS_PER_S:.3g} s, these ops and transfers to "
                f"{total_ps / PS_PER_NS / NS_PER_S:.3g} s. Check the rates and bandwidths of "
                f"machine {self.problem.machine.name!r}, or use objective latency and another "
                f"placer."
            )
        total_bytes = tasks.made_bytes.sum(dtype=float)
        if total_bytes >= _MAX_BYTES:
            raise ProblemError(
                f"Loads of a full pipeline are taken of tensors of less than {_MAX_BYTES:.3g} "
                f"bytes in all, these have {total_bytes:.3g}. Check the tensors of graph "
                f"{self.problem.graph.name!r}, or use objective latency and another placer."
            )

    @cached_property
    def prices(self) -> StepPrices:
        """What ops and transfers take."""
        return StepPrices(self.problem)

    @cached_property
    def of_task(self) -> I32:
        """Class of each task: tasks that share a device. `[N]`"""
        return step_classes(self.problem) if self.classes is None else self.classes

    def coarser(self, by_call: bool) -> StepProblem:
        """Classes of one module joined where they may go to the same devices.

        Args:
            by_call: Keep the calls of a module apart.
        """
        tasks, ops = self.problem.core.tasks, self.problem.graph.ops
        number: dict[tuple[object, ...], int] = {}
        joined = np.zeros(len(self.first), np.int32)
        for at, task in enumerate(self.first.tolist()):
            op = ops[tasks.task_op[task]]
            key: tuple[object, ...] = (op.module, op.micro_batch, op.call if by_call else -1)
            key = (*key, self.allowed[at].tobytes()) if op.module else (at,)
            joined[at] = number.setdefault(key, len(number))
        return StepProblem(self.problem, joined[self.of_task])

    def attached(self) -> StepProblem:
        """Parameters joined with the first forward op that reads them, where one device may hold
        both."""
        tasks, ops = self.problem.core.tasks, self.problem.graph.ops
        forward = np.array([ops[v].stage == "forward" for v in tasks.task_op], bool)
        has_forward = np.zeros(len(self.first), bool)
        has_forward[self.of_task[forward]] = True
        target = np.arange(len(self.first))
        carrier = np.repeat(np.arange(len(tasks.carrier_maker)), np.diff(tasks.cons_ptr))
        source = tasks.carrier_maker[carrier]
        reads = np.flatnonzero((tasks.is_source[source] > 0) & forward[tasks.cons])
        for edge in reads[np.argsort(tasks.cons[reads], kind="stable")].tolist():
            held, reader = self.of_task[source[edge]], self.of_task[tasks.cons[edge]]
            same = (self.allowed[held] == self.allowed[reader]).all()
            if same and not has_forward[held] and target[held] == held:
                target[held] = reader
        joined = np.unique(target, return_inverse=True)[1].reshape(-1).astype(np.int32)
        return StepProblem(self.problem, joined[self.of_task])

    @cached_property
    def first(self) -> I64:
        """First task of each class. `[M]`"""
        return np.unique(self.of_task, return_index=True)[1]

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Devices each class may go to. `[M, D]`"""
        rows = self.problem.allowed[self.problem.core.tasks.group]
        allowed = np.ones((int(self.of_task.max(initial=-1)) + 1, rows.shape[1]), bool)
        np.logical_and.at(allowed, self.of_task, rows)
        return allowed

    @cached_property
    def is_uniform(self) -> bool:
        """Whether accelerators are alike, CPUs are alike, and links cost the same."""
        wires, prices = self.problem.core.wires, self.prices
        for devices in (prices.accelerators, prices.cpus):
            first, others = devices[:1], devices[1:]
            for d in others:
                same = [
                    (wires.duration_ns[:, d] == wires.duration_ns[:, first[0]]).all(),
                    (self.allowed[:, d] == self.allowed[:, first[0]]).all(),
                    wires.streams[d] == wires.streams[first[0]],
                    wires.limit_bytes[d] == wires.limit_bytes[first[0]],
                ]
                if not all(same):
                    return False
        table = prices.transfer_ns[prices.kinds(self._paid_pairs)]
        return bool((table == table[:1]).all())

    @cached_property
    def _paid_pairs(self) -> list[tuple[int, int]]:
        usable = self.problem.usable_devices
        pays = self.prices.pays
        return [(d, e) for d in usable for e in usable if d != e and (pays[d] or pays[e])]

    @cached_property
    def permanent_bytes(self) -> I64:
        """Parameters and optimizer state each task holds from step to step. `[N]`"""
        return permanent_bytes(self.problem.core.tasks)

    @cached_property
    def passing_bytes(self) -> I64:
        """All other memory each task makes. `[N]`"""
        return self.problem.core.tasks.made_bytes - self.permanent_bytes

    def cheapest(self) -> LoadProblem:
        """A relaxation: the fastest times, cheapest links and largest memory; parameters alone
        take memory. No placement of the step has a smaller largest load than its bound."""
        limits = [self.problem.limit_bytes[d] for d in self.prices.accelerators]
        price = self._price(self._paid_pairs, np.min)
        time = [self._time_ps(devices, np.min) for devices in self._kinds]
        return self._build(price, time, self.permanent_bytes, max(limits, default=0), True)

    def dearest(self, held_bytes: I64, with_cpus: bool = True) -> LoadProblem:
        """Mean times, dearest links and smallest memory, with what each task is taken to hold.

        Args:
            held_bytes: `[N]`
            with_cpus: Use CPUs beside accelerators.
        """
        limits = [self.problem.limit_bytes[d] for d in self.prices.accelerators]
        pairs = self._paid_pairs
        if not with_cpus:
            fast = self.prices.accelerators
            pairs = [(d, e) for d in fast for e in fast if d != e]
        price = self._price(pairs, np.max)
        time = [self._time_ps(devices, np.mean) for devices in self._kinds]
        return self._build(price, time, held_bytes, min(limits, default=0), with_cpus)

    @property
    def _kinds(self) -> tuple[list[int], list[int]]:
        return self.prices.accelerators, self.prices.cpus

    def _price(self, pairs: list[tuple[int, int]], choose: Callable[..., Any]) -> I64:
        table = self.prices.transfer_ns[self.prices.kinds(pairs)]
        if not len(table):
            return np.zeros(table.shape[1], np.int64)
        return np.asarray(choose(table, axis=0), np.int64) * PS_PER_NS

    def _time_ps(self, devices: list[int], choose: Callable[..., Any]) -> I64:
        """Time of each task on one kind of device, over its streams. `[N]`"""
        wires = self.problem.core.wires
        if not devices:
            return np.zeros(len(wires.duration_ns), np.int64)
        each = wires.duration_ns[:, devices] * PS_PER_NS // wires.streams[devices]
        return np.asarray(choose(each, axis=1), np.int64)

    def _build(
        self, price: I64, time: list[I64], held: I64, limit: int, with_cpus: bool
    ) -> LoadProblem:
        """Nodes are tasks, then one for each carrier of a task that makes several: edges that leave
        a node cost the same."""
        tasks = self.problem.core.tasks
        maker = tasks.carrier_maker
        several = np.diff(tasks.out_ptr)[maker] > 1
        extra = np.flatnonzero(several)
        node = maker.copy()
        node[extra] = tasks.num_tasks + np.arange(len(extra))
        carrier = np.repeat(np.arange(len(maker)), np.diff(tasks.cons_ptr))
        more = np.zeros(len(extra), np.int64)
        of_node = np.concatenate([np.arange(tasks.num_tasks), maker[extra]])
        pinned, able, on_cpu = self._demands(time)
        back = np.array(
            [self.problem.graph.ops[v].stage in ("backward", "update") for v in tasks.task_op], bool
        )
        return LoadProblem(
            accelerator_ps=np.concatenate([time[0], more]),
            cpu_ps=np.concatenate([on_cpu, more]),
            can_accelerate=able[self.of_task][of_node],
            size_bytes=np.concatenate([held, more]),
            edge_src=np.concatenate([node[carrier], maker[extra]]),
            edge_dst=np.concatenate([tasks.cons, node[extra]]),
            edge_ps=np.concatenate([price[carrier], more]),
            color=pinned[self.of_task][of_node],
            is_backward=back[of_node],
            num_accelerators=len(self.prices.accelerators),
            num_cpus=len(self.prices.cpus) if with_cpus else 0,
            memory_bytes=limit,
        )

    def _demands(self, time: list[I64]) -> tuple[I32, NDArray[np.bool_], I64]:
        """Color of each class (those pinned to one device share one), whether it may go to an
        accelerator, and the time of each task on a CPU: too long where it may not go there."""
        allowed, fast, cpus = self.allowed, self.prices.accelerators, self.prices.cpus
        color = np.arange(len(allowed), dtype=np.int32)
        for d in self.problem.usable_devices:
            bound = np.flatnonzero(allowed[:, d] & (allowed.sum(axis=1) == 1))
            color[bound] = bound[0] if len(bound) else 0
        able = np.asarray(allowed[:, fast].any(axis=1), np.bool_)
        serial = allowed[:, cpus].any(axis=1) if cpus else np.ones(len(allowed), bool)
        banned = self.first[~serial]
        on_cpu = time[1].copy()
        never = min(int(time[0].sum()) + 1, _MAX_PS // max(1, len(banned)))
        on_cpu[banned] = np.maximum(on_cpu[banned], never)
        return color, able, on_cpu

    def spread(self, solution: I32) -> I32:
        """Device of each task from that of each node of a max-load problem, with the devices of one
        kind numbered so that pins hold where they can; others go to the fastest allowed. `[N]`
        """
        fast, cpus = self._kinds
        devices = np.array([*fast, *cpus], np.int32)
        node = np.asarray(solution, np.int32)[: len(self.of_task)]
        of_class = node[self.first]
        mapped = self._numbered(of_class, devices)[of_class]
        return self.legal(mapped)[self.of_task]

    def legal(self, device: I32) -> I32:
        """Device of each class: as given where it is allowed, else the fastest allowed. `[M]`"""
        ok = self.allowed[np.arange(len(device)), device]
        if ok.all():
            return device.astype(np.int32)
        time = np.where(self.allowed, self.work_ns, np.inf)
        return np.where(ok, device, time.argmin(axis=1)).astype(np.int32)

    def together(self, device: I32) -> I32:
        """Device of each class from that of each task: where most of its work lies. `[M]`"""
        votes = np.zeros(self.allowed.shape)
        weight = self.problem.core.wires.duration_ns.mean(axis=1) + 1e-9
        np.add.at(votes, (self.of_task, device), weight)
        return self.legal(votes.argmax(axis=1).astype(np.int32))

    @cached_property
    def work_ns(self) -> I64:
        """Time of all tasks of each class on each device. `[M, D]`"""
        columns, count = self.problem.core.wires.duration_ns, len(self.allowed)
        work = np.zeros((count, columns.shape[1]), np.int64)
        np.add.at(work, self.of_task, columns)
        return work

    def _numbered(self, of_class: I32, devices: I32) -> I32:
        """Device of each of the solution's: those that hold a pinned class get its device."""
        fast = len(self.prices.accelerators)
        given: dict[int, int] = {}
        single = self.allowed.sum(axis=1) == 1
        for at in np.flatnonzero(single).tolist():
            target, label = int(self.allowed[at].argmax()), int(of_class[at])
            same_kind = (label < fast) == (target in self.prices.accelerators)
            if same_kind and label not in given and target not in given.values():
                given[label] = target
        left: dict[bool, list[int]] = {True: [], False: []}
        for position, d in enumerate(devices.tolist()):
            if d not in given.values():
                left[position < fast].append(d)
        for label in range(len(devices)):
            if label not in given:
                given[label] = left[label < fast].pop(0)
        return np.array([given[label] for label in range(len(devices))], np.int32)
