"""The simulated timeline: op times, transfers and memory in use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Placement, Problem
from devplace.simulator.critical import critical_tasks
from devplace.simulator.fragmentation import gap_bytes
from devplace.simulator.kernel import SimulatorKernel
from devplace.simulator.reference import CoreTimeline
from devplace.units import format_bytes, format_time

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Transfer:
    """One tensor crossing one link.

    Attributes:
        tensor: Tensor id in the graph.
        src, dst: Device indices.
        request_ns: When it is ready to be sent.
        start_ns: When its channels are free for it.
        arrival_ns: When it can be read.
    """

    tensor: int
    src: int
    dst: int
    request_ns: int
    start_ns: int
    arrival_ns: int


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """One simulated step. In shapes `V` is ops and `D` devices.

    Attributes:
        problem: What was simulated.
        devices: Device of each op. `[V]`
        start_ns, finish_ns: Of each op; a view has its base's end, a source the end of the copies
            of the batch, or 0. `[V]`
        order: Per device the ops it runs, in order, as op indices (no sources, no views).
        makespan_ns: Length of the step.
        busy_ns: Time each device spends on ops. `[D]`
        transfers: In the order of their requests.
        memory: Rows of time, device, bytes in use from then on. `[M, 3]`
        task_devices, run: The same over tasks, as the simulator gave it.
    """

    problem: Problem
    devices: I32
    start_ns: I64
    finish_ns: I64
    order: tuple[tuple[int, ...], ...]
    makespan_ns: int
    busy_ns: I64
    transfers: tuple[Transfer, ...]
    memory: I64
    task_devices: I32
    run: CoreTimeline

    def __repr__(self) -> str:
        names = self.problem.machine.device_names
        peaks = ", ".join(
            f"{name} {format_bytes(int(peak))}"
            for name, peak in zip(names, self.peak_bytes, strict=True)
        )
        return f"Timeline(step {format_time(self.makespan_ns)}, peaks: {peaks})"

    @property
    def transfer_bytes(self) -> int:
        """Bytes that cross links in one step."""
        return sum(self.problem.graph.tensors[t.tensor].num_bytes for t in self.transfers)

    @property
    def batch_ns(self) -> int:
        """Time at its begin in which the batch is copied to its devices."""
        return self.problem.core.batch_ns(self.task_devices)

    @cached_property
    def gap_bytes(self) -> I64:
        """What torch reserves beyond the largest memory in use, per device. `[D]`

        See `gap_bytes` in `gaps.py`. 0 unless the costs say so (`has_gaps`), as those of a machine
        that the step will run on do.
        """
        if not self.problem.costs.has_gaps:
            return np.zeros(len(self.run.peak_bytes), np.int64)
        return gap_bytes(self.problem, self.task_devices, self.run)

    @cached_property
    def peak_bytes(self) -> I64:
        """Largest memory that a step needs per device: in use at once, and gaps. `[D]`"""
        return self.run.peak_bytes + self.gap_bytes

    @cached_property
    def pool_peak_bytes(self) -> I64:
        """The same per pool. `[P]`"""
        peak, pool = self.run.pool_peak_bytes.copy(), self.problem.core.wires.pool
        np.add.at(peak, pool[pool >= 0], self.gap_bytes[pool >= 0])
        return peak

    @cached_property
    def missing_bytes(self) -> dict[str, int]:
        """Device or pool name -> bytes over its limit; empty when everything fits."""
        machine, wires = self.problem.machine, self.problem.core.wires
        over = {
            name: int(peak - limit)
            for name, peak, limit in zip(
                machine.device_names, self.peak_bytes, wires.limit_bytes, strict=True
            )
        }
        for pool, peak, limit in zip(
            machine.pools, self.pool_peak_bytes, wires.pool_limit_bytes, strict=True
        ):
            over[pool.name] = int(peak - limit)
        return {name: value for name, value in over.items() if value > 0}

    @property
    def fits_in_use(self) -> bool:
        """Whether what is in use at once, gaps apart, stays within every limit."""
        run, wires = self.run, self.problem.core.wires
        fits = (run.peak_bytes <= wires.limit_bytes).all()
        return bool(fits and (run.pool_peak_bytes <= wires.pool_limit_bytes).all())

    @property
    def is_feasible(self) -> bool:
        """Whether every device and pool stays within its limit."""
        return self.fits_in_use and not self.missing_bytes  # gaps, which take long, only add

    def critical_path(self) -> list[int]:
        """Ops that decide the step's length, in time order.

        See `critical_tasks`.
        """
        core = self.problem.core
        chain = critical_tasks(core, self.task_devices, self.run)
        return [int(core.tasks.task_op[task]) for task in reversed(chain)]


def priorities(problem: Problem, placement: Placement, device: I32, kernel: SimulatorKernel) -> I64:
    """Priority of every task: the placement's own, or critical-path ones. `[N]`"""
    if placement.priority is None:
        return kernel.priority(device)
    return problem.task_priority(placement.priority)


def timeline_of(problem: Problem, device: I32, run: CoreTimeline) -> Timeline:
    """Timeline over ops from one over tasks."""
    tasks, spaces = problem.core.tasks, problem.spaces
    start, finish = np.zeros((2, len(problem.graph.ops)), np.int64)
    owned = tasks.op_task >= 0
    finish[owned] = run.finish_ns[tasks.op_task[owned]]
    start[owned] = finish[owned]
    start[tasks.task_op] = run.start_ns
    started = np.argsort(run.sequence, kind="stable").tolist()
    transfers = tuple(
        Transfer(int(tasks.carrier_tensor[x]), d, e, request, begin, arrival)
        for x, d, e, request, begin, arrival in run.transfers.tolist()
    )
    return Timeline(
        problem=problem,
        devices=spaces.op_devices(device),
        start_ns=start,
        finish_ns=finish,
        order=spaces.order_of(started, device, problem.core.num_devices),
        makespan_ns=run.makespan_ns,
        busy_ns=run.busy_ns,
        transfers=transfers,
        memory=run.memory,
        task_devices=device,
        run=run,
    )
