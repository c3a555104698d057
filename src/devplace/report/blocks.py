"""Modules by block: what a numbered module takes with all below it, and blocks that are alike.

A block is the first module on a path whose name is a number, as `encoder.layer.3`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from devplace.report.explain import ModuleRow


@dataclass(frozen=True)
class Row:
    """One line: a module, a block, or blocks that are alike; the sum of all below it.

    Attributes:
        name: What is shown.
        devices: Device -> time there, ns; most first.
        time_ns, critical_ns, received_bytes: As of a `ModuleRow`.
        memory_bytes: In use at the peaks of its devices.
        why: Why it is where it is; of several modules those reasons that occur.
        inside: What it sums up: blocks, or modules; empty for a module.
    """

    name: str
    devices: dict[str, int]
    time_ns: int
    critical_ns: int
    received_bytes: int
    memory_bytes: int
    why: str
    inside: tuple[Row, ...] = ()


def block_of(module: str) -> str:
    """The block that a module belongs to, or an empty text.

    Example:
        >>> block_of("encoder.layer.3.attention"), block_of("head")
        ('encoder.layer.3', '')
    """
    parts = module.split(".")
    depth = next((k for k, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: depth + 1])


def folded(modules: Iterable[ModuleRow], memory: Mapping[str, int]) -> tuple[Row, ...]:
    """Modules in the order of the model, blocks of equal modules and devices under one row.

    Args:
        modules: Rows of an explanation.
        memory: Module -> bytes; modules without a row get one.
    """
    rows: dict[str, Row] = {}
    for m in modules:
        name = m.module or "(model)"
        held, times = memory.get(m.module, 0), (m.time_ns, m.critical_ns, m.received_bytes)
        rows[m.module] = Row(name, m.devices, *times, held, m.why)
    for module, held in memory.items():
        if module not in rows and held:
            rows[module] = Row(module or "(model)", {}, 0, 0, 0, held, "")
    blocks: dict[str, list[str]] = {}
    for module in rows:
        blocks.setdefault(block_of(module) or f"\0{module}", []).append(module)
    alike: dict[tuple[object, ...], list[Row]] = {}
    for block, inside in blocks.items():
        if block.startswith("\0"):
            alike[(block,)] = [rows[inside[0]]]
            continue
        row = _sum(block, [rows[module] for module in inside])
        shape = tuple(sorted(module.removeprefix(block) for module in inside))
        key = (block.rpartition(".")[0], shape, tuple(sorted(row.devices)))
        alike.setdefault(key, []).append(row)
    return tuple(same[0] if len(same) == 1 else _sum(_title(same), same) for same in alike.values())


def _title(blocks: Sequence[Row]) -> str:
    """Example: `encoder.layer.0-3, 5: 5 alike`."""
    numbers = [int(row.name.rpartition(".")[2]) for row in blocks]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    above = blocks[0].name.rpartition(".")[0]
    return f"{above}{'.' if above else ''}{shown}: {len(blocks)} alike"


def _sum(name: str, inside: Sequence[Row]) -> Row:
    devices: Counter[str] = Counter()
    for row in inside:
        devices.update(row.devices)
    reasons = (reason for row in inside for reason in row.why.split(", ") if reason)
    why = ", ".join(dict.fromkeys(reasons))
    time_ns, critical_ns = sum(r.time_ns for r in inside), sum(r.critical_ns for r in inside)
    received, memory = sum(r.received_bytes for r in inside), sum(r.memory_bytes for r in inside)
    ordered = dict(devices.most_common())
    return Row(name, ordered, time_ns, critical_ns, received, memory, why, tuple(inside))
