"""Known machines by name, such as `h100x4`, `rtx4090+rtx3090x2`, `m2-max`, `laptop` or `cpux2`."""

from __future__ import annotations

import re

from devplace.errors import MachineError
from devplace.machine.machine import Machine
from devplace.machine.presets import wiring
from devplace.machine.presets.cards import CARDS
from devplace.machine.presets.families import by_name
from devplace.machine.presets.network import several_hosts

_IN_SERVERS = ("k40", "p100", "v100", "a100", "h100", "h200", "rtx4090")
_IN_CLUSTERS = ("a100", "h100", "h200")
"""On a network of 400 Gb/s; others have 10 Gb/s Ethernet."""
MAX_HOSTS = 16
NAMES: tuple[str, ...] = (
    *CARDS,
    *(f"{card}x{n}" for card in _IN_SERVERS for n in (1, 2, 4, 8)),
    *("laptop", "unequal-2"),
    *(f"cpux{n}" for n in (2, 3, 4)),
    *("2xh100x8", "2xrtx4090x1"),
)
"""Every card by itself, and some machines of several; any other count or mixture works as well."""

__all__ = ["CARDS", "NAMES", "get", "several_hosts"]


def get(name: str) -> Machine:
    """The machine called `name`: cards with counts, mixed by `+`; `cpuxN`, `laptop`, `unequal-2`.

    With a number of hosts before it, as in `2xh100x8`, so many of them on a network.

    Raises:
        MachineError: No such name; says which one is close.

    Example:
        >>> get("rtx4090+rtx3090x2").device_names
        ('cpu:0', 'cuda:0', 'cuda:1', 'cuda:2')
    """
    several = re.fullmatch(r"([0-9]{1,18})x(.+)", name)
    if several is None:
        return by_name(name)
    hosts, one = int(several.group(1)), by_name(several.group(2))
    if not 2 <= hosts <= MAX_HOSTS:
        raise MachineError(
            f"Known machines have 2 to {MAX_HOSTS} hosts, got {hosts}. Leave the number out for "
            f"one, or describe more with presets.several_hosts."
        )
    is_server = one.name.startswith(_IN_CLUSTERS)
    network = wiring.NETWORK_400G if is_server else wiring.ETHERNET_10G
    return several_hosts(one, hosts, network)
