"""Resolve the machine argument and check that its devices are on this computer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from devplace.device_kinds import CPU, DeviceKind, first_of, is_host
from devplace.errors import InputError, MachineError
from devplace.machine import Device, Machine, detect, load_machine
from devplace.problem.device_names import resolve_device

MachineLike = Machine | str | Path | int


def find_machine(machine: MachineLike) -> Machine:
    """The machine meant by an argument.

    Args:
        machine: `detect`, a preset's name, a machine file, a machine, or a number of logical CPU
            devices of this computer.

    Raises:
        MachineError: No such machine, or a number that is not positive.
    """
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, bool) or not isinstance(machine, int | str | Path):
        raise MachineError(
            "A machine must be 'detect', a name, a machine file, a Machine or a number of logical "
            f"CPU devices, got {machine!r}."
        )
    return detect(machine) if isinstance(machine, int) else load_machine(machine)


def excluded(machine: Machine, exclude: Sequence[str]) -> tuple[str, ...]:
    """Names of devices not to be used, from what users write.

    Raises:
        InputError: No list of names.
        ProblemError: No such device.
    """
    if isinstance(exclude, str):
        raise InputError(f"exclude must be a list of device names, got {exclude!r}.")
    return tuple(resolve_device(machine, name, "exclude") for name in exclude)


def cpus(machine: Machine, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of a machine's CPUs, but for some."""
    return tuple(d.name for d in machine.devices if d.traits.is_host and d.name not in but)


def accelerators(machine: Machine, exclude: Sequence[str]) -> list[Device]:
    """Devices that may be used and are no CPUs, but for some."""
    return [d for d in machine.devices if not d.traits.is_host and d.name not in exclude]


def capture_device(machine: Machine, exclude: Sequence[str] = (), in_part: bool = False) -> str:
    """For which torch device type a step is captured that shall run on this machine.

    `cuda` if the machine has GPUs and they are in this computer, else `cpu`.

    Args:
        machine: What the step shall run on.
        exclude: Devices that are not used.
        in_part: Whether other processes have some of the GPUs, so that here any will do.
    """
    fast = accelerators(machine, exclude)
    if fast and in_part:
        there = _num_here(fast[0].traits) > 0
    else:
        there = not missing_here(machine, exclude)
    return fast[0].traits.torch_type if fast and there else CPU.torch_type


def fuses(device_type: str, meant: Sequence[Device] = ()) -> bool:
    """Whether a step is fused unless told otherwise.

    On GPUs of this computer, if a compiler for them is there. On CPUs a kernel takes the C++
    compiler seconds, and hardly gains; but where GPUs elsewhere are meant, that is what they run.

    Args:
        device_type: For which torch device type the step is captured.
        meant: The accelerators that it is planned for.
    """
    if is_host(device_type):
        return bool(meant) and all(map(_has_compiler, meant))
    from devplace.kernels.fused import why_not_compiled

    return not why_not_compiled(first_of(device_type))


def _has_compiler(device: Device) -> bool:
    """Whether PyTorch's compiler makes kernels for it: of NVIDIA's GPUs for those from Volta on,
    which are the ones whose matrix units are faster in half precision."""
    rates = device.flops_per_s
    half = max(rates.get("bfloat16", 0), rates.get("float16", 0) / 2)
    return device.traits.compiler == "triton" and half > 1.1 * rates["float32"]


def missing_here(machine: Machine, exclude: Sequence[str] = ()) -> str:
    """Why the machine's devices are not those of this computer; empty if they are.

    Logical CPU devices are here if nothing else is to be used: any computer has them.
    """
    for device in accelerators(machine, exclude):
        torch_type, count = device.traits.torch_type, _num_here(device.traits)
        if device.name not in [f"{torch_type}:{index}" for index in range(count)]:
            have = f"this computer has {count} {torch_type.upper()} device{'s' * (count != 1)}"
            return f"machine {machine.name!r} has {device.name} ({device.model}), {have}"
        index = int(device.name.partition(":")[2])
        found = torch.get_device_module(torch_type).get_device_properties(index).name
        if device.model and device.model != found:
            return (
                f"{device.name} of machine {machine.name!r} is a {device.model}, here it is a "
                f"{found}"
            )
    return ""


def _num_here(kind: DeviceKind) -> int:
    """Devices of a kind that torch finds in this computer."""
    try:
        found = torch.get_device_module(kind.torch_type)
    except RuntimeError:  # this torch knows no such devices
        return 0
    return int(found.device_count()) if found.is_available() else 0


def require_here(machine: Machine, exclude: Sequence[str] = ()) -> None:
    """Refuse a machine that cannot be run on.

    Raises:
        InputError: Its devices are not in this computer.
    """
    reason = missing_here(machine, exclude)
    if reason:
        raise InputError(
            f"Only devices of this computer can run a step: {reason}. Use machine='detect', or "
            "only plan for that machine (devplace plan, dp.place)."
        )
