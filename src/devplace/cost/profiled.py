"""Profiled costs: every distinct op timed on the devices of this computer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from devplace.cost.analytic import Analytic
from devplace.cost.likely_order import likely_order
from devplace.cost.op_signature import op_calls
from devplace.cost.pricing import Priced, Pricing, extreme_calls, workspaces
from devplace.cost.remote import RemoteTimer, Spot
from devplace.cost.reuse import CacheTimes, cold_inputs
from devplace.cost.table import CostModel, CostTable
from devplace.cost.worker_process import WorkerProcess
from devplace.device_kinds import is_host, named_by_number
from devplace.files import cache_folder
from devplace.graph import Captured, OpGraph
from devplace.machine import Device, Machine
from devplace.machine.detect import cpu_model, driver_version

I64 = NDArray[np.int64]
KERNEL_GAP_NS = 850
"""Kernel gap of Hopper GPUs, for machines that have none of their own yet: every op in a step takes
so much longer than in a chain of its like, whatever it does, as launch records, code and addresses
come out of memory. Figures: docs/concepts/costs.md."""
TIMING = 5  # how ops are timed; times taken otherwise are not mixed with these


def default_cache() -> Path:
    """Where measured times are kept."""
    return cache_folder() / "timings.sqlite"


@dataclass(frozen=True)
class Profiled:
    """Price ops by timing each distinct one, in a CUDA graph on GPUs.

    That happens in a process of its own: what an op does to it costs the op its measurement, and
    nothing else. Integers are those of the example batch, and what the step makes of them; floats
    are made up.

    Devices of one model are timed once. A device that is not in this computer, an op that fails
    there, and what the time limit leaves out are priced by `base`, scaled by the median ratio of
    measured to `base` over ops of the same kind.

    Attributes:
        seconds: Time to measure for each model of device, at most, s (one op may exceed it).
        cache: SQLite file of earlier times; None keeps nothing.
        base: Prices what cannot be measured.
        skip: Devices (names) that need no measuring.
        cpu_threads: Threads of a CPU device; default: one if there are several CPU devices, else
            torch's.
        kernel_gap_ns: What an op on a GPU takes longer in a step than in a chain of its like, ns.
        tell: Told how far the compiling of fused groups is, which comes first and does not count
            as measuring.
        child: The process; by default one is started if there is something to measure.
    """

    seconds: float = 5.0
    cache: Path | None = field(default_factory=default_cache)
    base: CostModel = field(default_factory=Analytic)
    skip: tuple[str, ...] = ()
    cpu_threads: int | None = None
    kernel_gap_ns: int = KERNEL_GAP_NS
    tell: Callable[[str], None] | None = None
    child: WorkerProcess | None = None

    def __call__(self, graph: OpGraph, machine: Machine) -> CostTable:
        """Price every op of `graph` on every device of `machine`.

        Returns:
            int64 nanoseconds, shape `[V, D]`; `origin` is `profiled` if any device was measured,
            else that of `base`. `notes` say what was not measured and why. `kernels` marks what
            holds the kernel gap: the ops that do some work, on GPUs that were measured. `caching`
            tells how times there change with the order.
        """
        table = self.base(graph, machine)
        if not isinstance(graph, Captured):
            return table
        child = self.child or WorkerProcess()
        try:
            return self._measured(graph, machine, table, child)
        finally:
            if self.child is None:
                child.end()

    def _measured(
        self, graph: Captured, machine: Machine, table: CostTable, child: WorkerProcess
    ) -> CostTable:
        fast = [column for column, device in enumerate(machine.devices) if device.traits.has_graphs]
        order = likely_order(graph, table.compute_ns[:, (fast or [0])[0]].tolist())
        cold = cold_inputs(graph, order)
        calls, extremes = op_calls(graph, cold), extreme_calls(graph) if fast else {}
        compute_ns, workspace = table.compute_ns.copy(), workspaces(graph)
        warm_ns, cold_ns = compute_ns.copy(), compute_ns.copy()
        notes = _prepared(graph, machine, self.skip, self.tell)
        done: dict[str, Priced] = {}
        kernels = np.zeros(compute_ns.shape, np.bool_)
        for column, device in enumerate(machine.devices):
            found = self._spot(device, machine, graph) if device.name not in self.skip else None
            if found is None:
                continue
            place, spot = found
            if place not in done:
                timer = RemoteTimer(graph, spot, child)
                slow = timer.slow_down if device.traits.has_graphs else None
                pricing = Pricing(self.seconds, self.cache, place, timer, notes, slow, timer.clock)
                some = extremes if device.traits.has_graphs else {}
                done[place] = pricing.price(graph, calls, some, table.compute_ns[:, column])
                timer.close()
            priced = done[place]
            compute_ns[:, column] = priced.compute_ns
            warm_ns[:, column], cold_ns[:, column] = priced.warm_ns, priced.cold_ns
            if device.traits.has_graphs:
                workspace = np.maximum(workspace, priced.workspace_bytes)
                kernels[list(calls), column] = True
        if not done:
            return table
        measured = CostTable(
            compute_ns,
            "profiled",
            workspace_bytes=workspace,
            notes=tuple(notes),
            kernels=kernels if kernels.any() else None,
            caching=CacheTimes(cold, warm_ns, cold_ns) if kernels.any() else None,
        )
        return measured.with_kernel_gap(self.kernel_gap_ns)

    def _spot(self, device: Device, machine: Machine, graph: Captured) -> tuple[str, Spot] | None:
        """What times on a device depend on, and where they are taken; None if it is not here."""
        if device.traits.has_graphs:
            is_here = graph.program.device == device.traits.torch_type and _is_here(device)
            return (cuda_place(device.model), Spot(device.name)) if is_here else None
        if device.model != cpu_model():
            return None
        import torch

        several = sum(other.traits.is_host for other in machine.devices) > 1
        threads = self.cpu_threads or (1 if several else torch.get_num_threads())
        versions = f"timing {TIMING}|torch {torch.__version__}"
        return f"{device.model}|{versions}|{threads} threads", Spot("cpu", threads)


def _prepared(
    graph: Captured,
    machine: Machine,
    skip: Sequence[str],
    tell: Callable[[str], None] | None = None,
) -> list[str]:
    """Compile fused ops before anything is timed; gives what the user should know."""
    if not graph.is_fused:
        return []
    from devplace.kernels.prepare import prepare

    kind = graph.program.device
    names = [d.name for d in machine.devices if d.name not in skip and d.traits.has_graphs]
    done = prepare(graph, [kind] if is_host(kind) else _present(names), tell)
    return list(done.notes)


def _present(names: Sequence[str]) -> list[str]:
    """Those that are CUDA devices of this computer."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [name for name in names if name in map(named_by_number, range(count))]


def _is_here(device: Device) -> bool:
    """Whether a GPU is one of this computer."""
    return bool(_present([device.name])) and _model(device.name) == device.model


def _model(name: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(name).name)


def cuda_place(model: str) -> str:
    """All that times on a GPU depend on, as text: model, driver, versions, flags."""
    import torch

    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = (
        torch.get_float32_matmul_precision(),
        cuda.allow_bf16_reduced_precision_reduction,
        cuda.allow_fp16_reduced_precision_reduction,
        cudnn.allow_tf32,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
    versions = f"timing {TIMING}|torch {torch.__version__}"
    versions += f"|cuda {torch.version.cuda}|cudnn {cudnn.version()}"
    return f"{model}|driver {driver_version()}|{versions}|{flags}"
