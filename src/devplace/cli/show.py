"""Listings of machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from devplace.errors import InputError
from devplace.files import write_whole
from devplace.machine import Machine, load_machine, presets, toml
from devplace.simulator import native_module
from devplace.units import format_bandwidth, format_bytes, format_time


def machine_list(as_json: bool) -> None:
    """All cards, how they are counted and mixed, and which simulator is in use."""
    simulator = "native" if native_module() is not None else "python"
    if as_json:
        rows = [load_machine(name) for name in presets.NAMES]
        found = [{"name": m.name, "devices": [d.model for d in m.devices]} for m in rows]
        click.echo(json.dumps({"machines": found, "simulator": simulator}))
        return
    width = max(map(len, presets.CARDS))
    wide = max(len(card.model) for card in presets.CARDS.values())
    for name, card in presets.CARDS.items():
        half = max(d.get("float16", 0) for d in (card.peak_tflops, card.tensor_tflops))
        click.echo(
            f"{name:{width}}  {card.model:{wide}} {card.sold_gb:4d} GB {card.bandwidth_gb:5g} GB/s"
            f"  {card.peak_tflops['float32']:6g} TFLOP/s float32 {half:7g} float16"
        )
    click.echo(
        "\nCards are counted and mixed: 'rtx4090+rtx3090x2' is a machine of three cards. Peaks are"
        "\nthose of the data sheets; `devplace machines NAME` says what of them is reckoned with."
        "\n`-o FILE.toml` writes it as a machine file to edit. Other machines: laptop, unequal-2,"
        "\ncpuxN (N logical CPU devices). `detect` is this machine; machine files work the same."
    )
    if simulator == "native":
        click.echo("Simulator: native.")
    else:
        click.echo("Simulator: plain Python (the native one was not built; about 200x slower).")


def machine(name: str, output: Path | None, as_json: bool) -> None:
    """One machine: devices, links, sources; written to `output` as a machine file instead.

    Raises:
        InputError: `output` is no machine file's name, is there already, or cannot be written.
    """
    found = load_machine(name)
    if output is not None:
        _write(found, output)
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
            format_bandwidth(d.bytes_per_s),
            format_time(d.launch_gap_ns),
        )
    links, note = link_table(found)
    out = console()
    out.print(Text(found.name, style="bold"), devices, links)
    if note:
        out.print(note)
    for topic, source in found.sources.items():
        out.print(f"{topic}: {source}")


def _write(found: Machine, output: Path) -> None:
    if output.suffix != ".toml":
        raise InputError(f"Machine files end in .toml, got {output}. Name it {output.stem}.toml.")
    if output.exists():
        raise InputError(f"{output} is there already; it may be edited. Name another file.")
    try:
        write_whole(output, toml.dumps(found).encode())
    except OSError as error:
        raise InputError(f"Cannot write {output}: {error.strerror}. Check the path.") from error
    click.echo(f"Wrote {output}: edit it and use it as --machine {output}.", err=True)


def _as_json(found: Machine) -> dict[str, Any]:
    import msgspec

    return {
        "name": found.name,
        "devices": msgspec.to_builtins(found.devices),
        "links": msgspec.to_builtins(found.links),
        "pools": msgspec.to_builtins(found.pools),
        "sources": found.sources,
    }
