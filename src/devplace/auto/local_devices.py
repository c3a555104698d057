"""Resolve the machine argument and check that its devices are on this computer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from devplace.errors import InputError, MachineError
from devplace.machine import Machine, detect, load_machine
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
    return tuple(d.name for d in machine.devices if d.kind == "cpu" and d.name not in but)


def has_gpus(machine: Machine, exclude: Sequence[str] = ()) -> bool:
    """Whether a device that may be used is no CPU."""
    return any(d.kind != "cpu" and d.name not in exclude for d in machine.devices)


def capture_device(machine: Machine, exclude: Sequence[str] = (), in_part: bool = False) -> str:
    """For which torch device type a step is captured that shall run on this machine.

    `cuda` if the machine has GPUs and they are in this computer, else `cpu`.

    Args:
        machine: What the step shall run on.
        exclude: Devices that are not used.
        in_part: Whether other processes have some of the GPUs, so that here any will do.
    """
    there = has_gpus(machine, exclude)
    if there and in_part:
        import torch

        there = torch.cuda.is_available()
    elif there:
        there = not missing_here(machine, exclude)
    return "cuda" if there else "cpu"


def fuses(device_type: str) -> bool:
    """Whether a step captured for a type of device of this computer is fused unless told otherwise:
    on GPUs, if a compiler for them is there. On CPUs a kernel takes the C++ compiler seconds, and
    hardly gains."""
    if device_type != "cuda":
        return False
    from devplace.kernels.fused import why_not_compiled

    return not why_not_compiled("cuda:0")


def missing_here(machine: Machine, exclude: Sequence[str] = ()) -> str:
    """Why the machine's devices are not those of this computer; empty if they are.

    Logical CPU devices are here if nothing else is to be used: any computer has them.
    """
    gpus = [d for d in machine.devices if d.kind != "cpu" and d.name not in exclude]
    if not gpus:
        return ""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    have = f"this computer has {count} CUDA device{'s' if count != 1 else ''}"
    known = {f"cuda:{index}" for index in range(count)}
    for gpu in gpus:
        if gpu.name not in known:
            return f"machine {machine.name!r} has {gpu.name} ({gpu.model}), {have}"
        found = torch.cuda.get_device_properties(int(gpu.name[5:])).name
        if gpu.model and gpu.model != found:
            return f"{gpu.name} of machine {machine.name!r} is a {gpu.model}, here it is a {found}"
    return ""


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
