"""Probe of a machine's links: latency, bandwidth, overheads, and whether data arrives unharmed."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from devplace import __version__
from devplace.machine import Machine
from devplace.machine.detect import driver_version
from devplace.run.probe.kept_probe import cached_report, keep_report
from devplace.run.probe.mailboxes import CpuBench
from devplace.run.probe.probe_run import Bench, run_probe
from devplace.run.probe.probed_machine import link_fit, machine_from_probe
from devplace.run.probe.report import DeviceReport, PairReport, ProbeReport, Sharing, StepReport

__all__ = [
    "DeviceReport",
    "PairReport",
    "ProbeReport",
    "Sharing",
    "StepReport",
    "cached_probe",
    "keep_report",
    "link_fit",
    "machine_from_probe",
    "probe",
    "probe_key",
]


def probe(machine: Machine) -> ProbeReport:
    """Check and measure every link of this machine; a few seconds.

    Links between GPUs and with the host where the machine has GPUs, else links between its logical
    CPU devices. Nothing else may run on the devices meanwhile.

    Args:
        machine: As detected here.

    Raises:
        ExecutionError: The devices themselves failed.
    """
    return run_probe(_bench(machine), probe_key(machine))


def cached_probe(machine: Machine) -> ProbeReport:
    """As `probe`, but from the user's cache if the machine was probed before.

    Args:
        machine: As detected here.
    """
    return cached_report(probe_key(machine), lambda: probe(machine))


def probe_key(machine: Machine) -> dict[str, str]:
    """What a probe of this machine is true of: devices, driver and versions."""
    gpus = [device for device in machine.devices if device.traits.has_graphs]
    key = {"devplace": __version__, "torch": str(torch.__version__)}
    if not gpus:
        model = machine.devices[0].model
        return {**key, "devices": f"{len(machine.devices)} x {model}", "host": platform.node()}
    names = " ".join(f"{gpu.name}={gpu.uuid or gpu.model}" for gpu in gpus)
    return {**key, "devices": names, "driver": driver_version()}


def _bench(machine: Machine) -> Bench:
    gpus: Sequence[str] = [device.name for device in machine.devices if device.traits.has_graphs]
    if not gpus:
        return CpuBench(machine.device_names)
    from devplace.run.cuda.probe import CudaBench

    return CudaBench(gpus)
