"""Several equal computers on one network as a machine."""

from __future__ import annotations

import re

import msgspec

from devplace.errors import MachineError
from devplace.machine.machine import Device, Link, Machine, Pool, channels_of
from devplace.machine.presets.wiring import Wire


def several_hosts(one: Machine, num_hosts: int, network: Wire, cards_per_host: int = 1) -> Machine:
    """`num_hosts` computers like `one`, each with its own cards into one network.

    Devices are numbered on through the hosts `host0`, `host1`, ...: the first of the second
    `h100x8` is `cuda:8`, its CPU `cpu:1`. What goes from host to host occupies the network card of
    the sender on its way out and that of the receiver on its way in, so all devices behind one card
    share it.

    Args:
        one: A machine of one host.
        num_hosts: At least 2.
        network: Between the hosts; its bandwidth is that of one card.
        cards_per_host: Network cards of each host; its devices of one kind share them evenly, in
            order.

    Raises:
        MachineError: A number out of range, `one` has several hosts, or devices that are not called
            like `cuda:0`.
    """
    if num_hosts < 2 or cards_per_host < 1 or len(one.hosts) > 1:
        raise MachineError(
            f"A network joins 2 or more hosts with a card or more each: got {num_hosts} times "
            f"machine {one.name!r} of {len(one.hosts)} hosts, with {cards_per_host} cards each."
        )
    copies = [_Copy(one, index, cards_per_host) for index in range(num_hosts)]
    between = (
        network.link(src, dst, (f"network-out:{out}", f"network-in:{into}"))
        for first in copies
        for second in copies
        if first is not second
        for src, out in first.cards.items()
        for dst, into in second.cards.items()
    )
    return Machine(
        name=f"{num_hosts}x{one.name}",
        devices=tuple(device for copy in copies for device in copy.devices),
        links=(*(link for copy in copies for link in copy.links), *between),
        pools=tuple(pool for copy in copies for pool in copy.pools),
        sources={**one.sources, "network": network.source},
    )


class _Copy:
    """One of the hosts.

    Attributes:
        cards: Name of each device -> its network card.
    """

    def __init__(self, one: Machine, index: int, num_cards: int) -> None:
        self._host = f"host{index}"
        kinds = [_kind(device) for device in one.devices]
        names = {
            device.name: f"{kind}:{index * kinds.count(kind) + kinds[:k].count(kind)}"
            for k, (device, kind) in enumerate(zip(one.devices, kinds, strict=True))
        }
        self.devices = tuple(self._device(device, names) for device in one.devices)
        self.links = tuple(self._link(link, names) for link in one.links)
        self.pools = tuple(
            Pool(name=self._own(pool.name), memory_bytes=pool.memory_bytes) for pool in one.pools
        )
        self.cards = {
            names[
                device.name
            ]: f"{self._host}.{kinds[:k].count(kind) * num_cards // kinds.count(kind)}"
            for k, (device, kind) in enumerate(zip(one.devices, kinds, strict=True))
        }

    def _own(self, name: str) -> str:
        return f"{name}@{self._host}"

    def _device(self, device: Device, names: dict[str, str]) -> Device:
        pool = self._own(device.pool) if device.pool else ""
        return msgspec.structs.replace(device, name=names[device.name], pool=pool, host=self._host)

    def _link(self, link: Link, names: dict[str, str]) -> Link:
        channels = tuple(map(self._own, channels_of(link)))
        return msgspec.structs.replace(
            link, src=names[link.src], dst=names[link.dst], channels=channels
        )


def _kind(device: Device) -> str:
    found = re.fullmatch(r"(.+):[0-9]+", device.name)
    if found is None:
        raise MachineError(
            f"Devices of several hosts are numbered on: {device.name!r} must be called like "
            f"'cuda:0'."
        )
    return found.group(1)
