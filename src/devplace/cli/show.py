"""Listings of machines."""

from __future__ import annotations

import json
from typing import Any

import click

from devplace.machine import Machine, load_machine, presets
from devplace.simulator import native_module
from devplace.units import format_bytes, format_time


def machine_list(as_json: bool) -> None:
    """All presets, and which simulator is in use."""
    simulator = "native" if native_module() is not None else "python"
    rows = [load_machine(name) for name in presets.NAMES]
    if as_json:
        found = [{"name": m.name, "devices": [d.model for d in m.devices]} for m in rows]
        click.echo(json.dumps({"machines": found, "simulator": simulator}))
        return
    width = max(len(m.name) for m in rows)
    for m in rows:
        click.echo(f"{m.name:{width}}  {_devices_line(m)}")
    click.echo("\n`detect` is this machine; any machine file (.toml) works the same.")
    if simulator == "native":
        click.echo("Simulator: native.")
    else:
        click.echo("Simulator: plain Python (the native one was not built; about 200x slower).")


def _devices_line(machine: Machine) -> str:
    counts: dict[str, int] = {}
    for device in machine.devices:
        label = f"{device.model or device.kind} ({format_bytes(device.memory_bytes)})"
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(f"{n} x {label}" if n > 1 else label for label, n in counts.items())


def machine(name: str, as_json: bool) -> None:
    """One machine: devices, links, sources."""
    found = load_machine(name)
    if as_json:
        click.echo(json.dumps(_as_json(found)))
        return
    from rich.table import Table
    from rich.text import Text

    from devplace.cli.console import console
    from devplace.cli.links import link_table

    devices = Table("device", "model", "memory", "reserve", "float32", "bandwidth", "gap")
    for d in found.devices:
        devices.add_row(
            d.name,
            d.model,
            format_bytes(d.memory_bytes),
            format_bytes(d.reserve_bytes),
            f"{d.flops_per_s['float32'] / 1e12:.3g} TFLOP/s",
            f"{format_bytes(d.bytes_per_s)}/s",
            format_time(d.launch_gap_ns),
        )
    links, note = link_table(found)
    out = console()
    out.print(Text(found.name, style="bold"), devices, links)
    if note:
        out.print(note)
    for topic, source in found.sources.items():
        out.print(f"{topic}: {source}")


def _as_json(found: Machine) -> dict[str, Any]:
    import msgspec

    return {
        "name": found.name,
        "devices": msgspec.to_builtins(found.devices),
        "links": msgspec.to_builtins(found.links),
        "pools": msgspec.to_builtins(found.pools),
        "sources": found.sources,
    }
