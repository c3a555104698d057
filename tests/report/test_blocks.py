"""Modules by block."""

from __future__ import annotations

from devplace.report.blocks import block_of, folded
from devplace.report.explain import ModuleRow


def row(module: str, time_ns: int, device: str = "cuda:0", why: str = "load") -> ModuleRow:
    """A module on one device."""
    return ModuleRow(module, 1, {device: time_ns}, time_ns, time_ns // 2, 0.0, 10, why)


def test_equal_layers_are_one_row() -> None:
    """Twelve layers fold into one row that holds their sum; opened, each has its modules."""
    layers = [row(f"enc.layer.{k}.{part}", 5) for k in range(12) for part in ("att", "mlp")]
    found = folded([row("embed", 7), *layers, row("head", 3)], {"enc.layer.3.mlp": 100})
    assert [line.name for line in found] == ["embed", "enc.layer.0-11: 12 alike", "head"]
    group = found[1]
    assert (group.time_ns, group.critical_ns, group.received_bytes) == (120, 48, 240)
    assert group.memory_bytes == 100
    assert [block.name for block in group.inside] == [f"enc.layer.{k}" for k in range(12)]
    assert [line.name for line in group.inside[3].inside] == ["enc.layer.3.att", "enc.layer.3.mlp"]


def test_layers_of_other_devices_or_modules_are_not_alike() -> None:
    """A fold has blocks of the same modules on the same devices; gaps in numbers are shown."""
    rows = [row(f"l.{k}.a", 5, "cuda:1" if k == 2 else "cuda:0") for k in range(5)]
    found = folded([*rows, row("l.5.b", 5)], {})
    assert [line.name for line in found] == ["l.0-1, 3-4: 4 alike", "l.2", "l.5"]
    assert sum(line.time_ns for line in found) == 30


def test_a_reason_is_named_once() -> None:
    """Also where blocks have it beside others."""
    reasons = [("l.0.a", "load"), ("l.0.b", "spread"), ("l.1.a", "load"), ("l.1.b", "load")]
    (fold,) = folded([row(name, 5, why=why) for name, why in reasons], {})
    assert fold.why == "load, spread"


def test_modules_that_only_hold_memory_have_a_row() -> None:
    """A frozen embedding takes memory and no time."""
    found = folded([row("head", 3)], {"embed": 9, "": 4, "nothing": 0})
    assert {line.name: line.memory_bytes for line in found} == {"head": 0, "embed": 9, "(model)": 4}


def test_a_block_is_the_first_numbered_module() -> None:
    """Numbers further down belong to it."""
    assert [block_of(m) for m in ("h.0", "h.0.mlp.1", "head", "", "3")] == [
        "h.0",
        "h.0",
        "",
        "",
        "3",
    ]
