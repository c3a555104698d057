"""Known machines by name, such as `h100x4`, `laptop` or `cpux2`."""

from __future__ import annotations

import re

from devplace.errors import MachineError, did_you_mean
from devplace.machine.machine import Machine
from devplace.machine.presets.families import (
    FAMILIES,
    SINGLES,
    a100,
    build,
    cpu,
    h100,
    h200,
    k40,
    laptop,
    p100,
    rtx4090,
    unequal_2,
    v100,
)

NAMES: tuple[str, ...] = (
    *(f"{family}x{n}" for family in FAMILIES if family != "cpu" for n in (1, 2, 4, 8)),
    *SINGLES,
    *(f"cpux{n}" for n in (2, 3, 4)),
)
"""The usual names; any other number of devices a family can have works as well."""

__all__ = [
    "NAMES",
    "a100",
    "cpu",
    "get",
    "h100",
    "h200",
    "k40",
    "laptop",
    "p100",
    "rtx4090",
    "unequal_2",
    "v100",
]


def get(name: str) -> Machine:
    """The machine called `name`: `FAMILYxN` (`k40x3`, `h100x8`, `cpux2`), `laptop`, `unequal-2`.

    Raises:
        MachineError: No such name; says which one is close.

    Example:
        >>> get("v100x2").device_names
        ('cpu:0', 'cuda:0', 'cuda:1')
    """
    if name in SINGLES:
        return SINGLES[name]()
    match = re.fullmatch(r"([a-z0-9]+?)x([0-9]+)", name)
    if match and match.group(1) in FAMILIES:
        return build(match.group(1), int(match.group(2)))
    raise MachineError(
        f"There is no machine called {name!r}.{did_you_mean(name, NAMES)} "
        f"Families: {', '.join(f'{f}xN' for f in FAMILIES)}; others: {', '.join(SINGLES)}."
    )
