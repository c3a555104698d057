"""Predicted memory beside the measured one."""

from __future__ import annotations

import pytest

from devplace.report import measured_memory_rows, measured_memory_table

pytest.importorskip("torch")
from devplace.run.cuda.device_memory import DeviceMemory


def found(device: str, reserved: int) -> DeviceMemory:
    """A device that ran a step."""
    return DeviceMemory(device, 900, reserved // 2, reserved, 800, 600, 7)


def test_the_error_is_against_what_is_reserved() -> None:
    """A prediction of 1530 against 1500 reserved is 2 % high; nothing reserved gives no error."""
    rows = measured_memory_rows({"cuda:0": 1530}, [found("cuda:0", 1500), found("cuda:1", 0)])
    assert rows[0]["error"] == pytest.approx(0.02)
    assert rows[0]["reserved_peak_bytes"] == 1500
    assert rows[1]["error"] is None
    assert rows[1]["predicted_bytes"] == 0


def test_the_table_has_a_line_per_device() -> None:
    """Names, sizes with units and the error in percent, in columns."""
    text = measured_memory_table({"cuda:0": 1530}, [found("cuda:0", 1500), found("cuda:1", 0)])
    head, first, second = text.splitlines()
    columns = ["device", "predicted", "in a step", "reserved", "graph", "outside", "error"]
    assert [part.strip() for part in head.split("  ") if part.strip()] == columns
    assert first.split()[0] == "cuda:0"
    assert "1.49 KiB" in first
    assert first.endswith("+2.0%")
    assert second.endswith("-")
    assert len({len(line) for line in text.splitlines()}) == 1
