"""What ops cost on the devices a step is planned for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from devplace.auto.calibration import Calibration, calibrated
from devplace.cost import CostTable
from devplace.cost.profiled import Profiled
from devplace.graph import OpGraph
from devplace.machine import Machine, detect

# Overheads and shares: fitted once, by code that is not kept, to 40 plans of RNNLM, NMT-4, GNMT-4,
# ResNet-50 and BERT-large (12 layers, batch 32, one and four micro-batches) on 2 and 4 H100, with
# an earlier executor. The factor: 4 MiB took 27 us in those steps by the fit, 21 us alone. How well
# they do, on these steps and on others: docs/results/gpu_plans.md.
HOPPER = Calibration(
    send_overhead_ns=3_300,
    receive_overhead_ns=2_900,
    send_share=0.05,
    receive_share=0.034,
    engine_factor=1.25,
)


def price(graph: OpGraph, machine: Machine, skip: Sequence[str] = ()) -> CostTable:
    """Costs for planning a step that will run here: measured ones.

    Args:
        graph: The step.
        machine: Its machine.
        skip: Devices that are not used, so need no measuring.
    """
    table = Profiled(skip=tuple(skip))(graph, machine)
    gpus = [d.name for d in machine.devices if d.kind == "gpu" and d.name not in skip]
    if not gpus or table.origin != "profiled":
        return table
    from devplace.run.cuda.memory import held_bytes

    held = held_bytes(gpus[0])
    per_device = [held if device.kind == "gpu" else 0 for device in machine.devices]
    return replace(table, held_bytes=np.array(per_device, np.int64), has_gaps=True)


def measured_machine(machine: Machine) -> Machine:
    """A detected machine with probed and calibrated links, if it has several GPUs."""
    if sum(device.kind == "gpu" for device in machine.devices) < 2:
        return machine
    from devplace.auto.learn import kept_calibration

    return calibrated(probed_machine(machine), kept_calibration(machine) or HOPPER)


def probed_machine(machine: Machine) -> Machine:
    """A detected machine with links as probed; probes it if that was not done before."""
    from devplace.run.probe import cached_probe, machine_from_probe

    return machine_from_probe(machine, cached_probe(machine))


def detected() -> Machine:
    """This computer, measured."""
    return measured_machine(detect())
