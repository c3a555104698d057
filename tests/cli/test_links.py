"""Links of a machine as a table."""

from __future__ import annotations

import io

from rich.console import Console

from devplace.cli import links
from devplace.machine import Device, Link, Machine


def device(number: int) -> Device:
    return Device(
        name=f"cuda:{number}",
        kind="gpu",
        memory_bytes=10**9,
        flops_per_s={"float32": 10**12},
        bytes_per_s=10**11,
    )


def star(count: int) -> Machine:
    """Every device has a link to the first and back."""
    ways = [(0, k) for k in range(1, count)] + [(k, 0) for k in range(1, count)]
    found = tuple(
        Link(src=f"cuda:{a}", dst=f"cuda:{b}", bytes_per_s=10**10, latency_ns=1000) for a, b in ways
    )
    return Machine("star", tuple(map(device, range(count))), found)


def rows(machine: Machine) -> tuple[list[list[str]], str]:
    table, note = links.link_table(machine)
    return [
        list(row) for row in zip(*(column.cells for column in table.columns), strict=True)
    ], note


def test_few_devices_are_listed_pair_by_pair():
    """Each ordered pair is a row with its path."""
    found, note = rows(star(3))
    assert note == ""
    assert [row[:2] for row in found] == [
        [f"cuda:{a}", f"cuda:{b}"] for a, b in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    ]
    assert found[3] == ["cuda:1", "cuda:2", "5 GB/s", "2 us", "cuda:1->cuda:0, cuda:0->cuda:2"]


def test_many_devices_are_listed_by_kind():
    """300 devices have two kinds of pairs: 2 x 299 direct ones and 299 x 298 with a stop."""
    found, note = rows(star(300))
    assert found == [
        ["89,102", "cuda:1 -> cuda:2", "5 GB/s", "2 us", "cuda:1->cuda:0, cuda:0->cuda:2"],
        ["598", "cuda:0 -> cuda:1", "10 GB/s", "1 us", ""],
    ]
    assert note == "89,700 pairs of devices, by kind. --json has every direct link."


def test_kinds_that_are_left_out_are_told(monkeypatch):
    """No more rows than are of use, however many kinds there are."""
    monkeypatch.setattr(links, "MAX_KINDS", 1)
    found, note = rows(star(20))
    assert [row[0] for row in found] == ["342"]
    assert "Left out are the rarest kinds, 1 of 2." in note


def test_a_table_of_many_devices_is_short():
    """What is printed does not grow with the pairs."""
    table, _ = links.link_table(star(100))
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    assert len(out.getvalue().splitlines()) == 6
