"""The links of a machine as a readable table, for any number of devices."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from devplace.machine import Link, Machine
from devplace.units import format_bandwidth, format_time

# Pairs of devices that are listed one by one, and kinds of pairs that are listed.
MAX_PAIRS = 300
MAX_KINDS = 100


def link_table(machine: Machine) -> tuple[Table, str]:
    """Every pair of devices with its path; of many devices one row for each kind of pair, and a
    note that says so.

    Pairs are of one kind where the same bandwidth, latency and number of channels are shown.
    """
    count = len(machine.devices) * (len(machine.devices) - 1)
    if count <= MAX_PAIRS:
        table = Table("from", "to", "bandwidth", "latency", "channels")
        for link in _paths(machine):
            table.add_row(link.src, link.dst, *_shown(link), ", ".join(link.channels))
        return table, ""
    return _kinds(machine, count)


def _kinds(machine: Machine, count: int) -> tuple[Table, str]:
    pairs: dict[tuple[str, str, int], list[Link]] = {}
    for link in _paths(machine):
        pairs.setdefault((*_shown(link), len(link.channels)), []).append(link)
    kinds = sorted(pairs.items(), key=lambda kind: -len(kind[1]))
    table = Table("pairs", "such as", "bandwidth", "latency", "channels")
    for (bandwidth, latency, _), links in kinds[:MAX_KINDS]:
        first = links[0]
        example = f"{first.src} -> {first.dst}"
        table.add_row(f"{len(links):,}", example, bandwidth, latency, ", ".join(first.channels))
    left = len(kinds) - MAX_KINDS
    rare = f" Left out are the rarest kinds, {left:,} of {len(kinds):,}." if left > 0 else ""
    return table, f"{count:,} pairs of devices, by kind.{rare} --json has every direct link."


def _paths(machine: Machine) -> Iterator[Link]:
    for src in machine.device_names:
        for dst in machine.device_names:
            link = machine.path(src, dst) if src != dst else None
            if link is not None:
                yield link


def _shown(link: Link) -> tuple[str, str]:
    return format_bandwidth(link.bytes_per_s), format_time(link.latency_ns)
