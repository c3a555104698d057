"""Measured op costs and link speeds for the machine a step will run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from devplace.cost import CostTable
from devplace.cost.profiled import KERNEL_GAP_NS, Profiled
from devplace.cost.worker_process import WorkerProcess
from devplace.graph import OpGraph
from devplace.machine import Machine
from devplace.tune.calibration import Calibration, calibrated
from devplace.tune.kept_calibration import kept_calibration

# Overheads: measured on 2 H200 with code that is not kept, in a graph of 384 ops: a wait for what
# has come takes 1.2 us of its receiver, a push of 64 KiB beside products of matrices up to 1.4.
# Shares: chosen among 61 sets, by code that is not kept, for the plans of RNNLM, NMT-4, GNMT-4,
# ResNet-50 and BERT-large (12 layers) on up to 4 H200 of docs/results/gpu_plans.md. The factor is
# of an earlier fit: 4 MiB took 27 us in steps, 21 us alone. The kernel gap: steps on one GPU,
# docs/concepts/costs.md.
HOPPER = Calibration(
    send_overhead_ns=1_300,
    receive_overhead_ns=1_200,
    send_share=0.04,
    receive_share=0.18,
    engine_factor=1.25,
    kernel_gap_ns=KERNEL_GAP_NS,
)


def price(
    graph: OpGraph,
    machine: Machine,
    skip: Sequence[str] = (),
    kernel_gap_ns: int | None = None,
    tell: Callable[[str], None] | None = None,
    child: WorkerProcess | None = None,
) -> CostTable:
    """Costs for planning a step that will run here: measured ones.

    Args:
        graph: The step.
        machine: Its machine.
        skip: Devices that are not used, so need no measuring.
        kernel_gap_ns: Of ops on GPUs, ns; default: the one kept for this machine, else HOPPER's.
        tell: Told how far the compiling of fused groups is.
        child: Process that measures; by default one is started.
    """
    gpus = [d.name for d in machine.devices if d.traits.has_graphs and d.name not in skip]
    if kernel_gap_ns is None:
        kernel_gap_ns = (_kept_or_hopper(machine) if gpus else HOPPER).kernel_gap_ns
    profiled = Profiled(skip=tuple(skip), kernel_gap_ns=kernel_gap_ns, tell=tell, child=child)
    table = profiled(graph, machine)
    if not gpus or table.origin != "profiled":
        return table
    from devplace.run.cuda.device_memory import held_bytes

    held = held_bytes(gpus[0])
    per_device = [held if device.traits.has_graphs else 0 for device in machine.devices]
    return replace(table, held_bytes=np.array(per_device, np.int64), has_gaps=True)


def measured_machine(machine: Machine) -> Machine:
    """A detected machine with probed and calibrated links, if it has several GPUs."""
    if not _has_several_gpus(machine):
        return machine
    return calibrated(probed_machine(machine), _kept_or_hopper(machine))


def probed_machine(machine: Machine) -> Machine:
    """A detected machine with links as probed, if it has several GPUs; probes it if that was not
    done before."""
    if not _has_several_gpus(machine):
        return machine
    from devplace.run.probe import cached_probe, machine_from_probe

    return machine_from_probe(machine, cached_probe(machine))


def _has_several_gpus(machine: Machine) -> bool:
    return sum(device.traits.has_graphs for device in machine.devices) > 1


def _kept_or_hopper(machine: Machine) -> Calibration:
    return kept_calibration(machine) or HOPPER
