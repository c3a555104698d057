"""Resolve device names as users write them."""

from __future__ import annotations

from collections.abc import Mapping

from devplace.device_kinds import named_by_number
from devplace.errors import ProblemError, did_you_mean
from devplace.machine import Machine
from devplace.units import parse_size


def resolve_device(machine: Machine, name: str | int, where: str) -> str:
    """The device a user means: its name, `cuda` or `cpu` when there is one, or a GPU's index.

    Raises:
        ProblemError: No such device; lists the known ones.
    """
    text = named_by_number(name) if str(name).isdigit() else str(name)
    if text in machine.device_index:
        return text
    same = [device for device in machine.device_names if device.split(":")[0] == text]
    if len(same) == 1:
        return same[0]
    known = machine.device_names
    hint = " Name one device at a time." if "," in text else did_you_mean(text, known)
    raise ProblemError(f"Unknown device {name!r} in {where}.{hint} Known: {', '.join(known)}.")


def require_mapping(name: str, value: object) -> None:
    """Refuse limits or pins that are no dictionary.

    Raises:
        ProblemError: Shows how to write one.
    """
    if not isinstance(value, Mapping):
        raise ProblemError(
            f"{name} must be a dictionary such as {{'cuda:0': '20GiB'}} or "
            f"{{'encoder.*': 'cuda:1'}}, got {value!r}."
        )


def without_memory(machine: Machine, limits: Mapping[str, int | str]) -> tuple[str, ...]:
    """Devices that a limit of 0 says not to use.

    Raises:
        ProblemError, InputError: No dictionary, no such device, or no size.
    """
    require_mapping("limits", limits)
    sizes = [
        (resolve_device(machine, name, "limits"), parse_size(value, f"Limit of {name}"))
        for name, value in limits.items()
    ]
    return tuple(name for name, size in sizes if size == 0)
