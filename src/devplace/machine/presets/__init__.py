"""Known machines by name, such as `h100x4`, `rtx4090+rtx3090x2`, `m2-max`, `laptop` or `cpux2`."""

from __future__ import annotations

from devplace.machine.machine import Machine
from devplace.machine.presets.cards import CARDS
from devplace.machine.presets.families import by_name

_IN_SERVERS = ("k40", "p100", "v100", "a100", "h100", "h200", "rtx4090")
NAMES: tuple[str, ...] = (
    *CARDS,
    *(f"{card}x{n}" for card in _IN_SERVERS for n in (1, 2, 4, 8)),
    *("laptop", "unequal-2"),
    *(f"cpux{n}" for n in (2, 3, 4)),
)
"""Every card by itself, and some machines of several; any other count or mixture works as well."""

__all__ = ["CARDS", "NAMES", "get"]


def get(name: str) -> Machine:
    """The machine called `name`: cards with counts, mixed by `+`; `cpuxN`, `laptop`, `unequal-2`.

    Raises:
        MachineError: No such name; says which one is close.

    Example:
        >>> get("rtx4090+rtx3090x2").device_names
        ('cpu:0', 'cuda:0', 'cuda:1', 'cuda:2')
    """
    return by_name(name)
