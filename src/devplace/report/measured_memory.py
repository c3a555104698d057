"""Predicted peak memory of every device beside the measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from devplace.units import format_bytes

if TYPE_CHECKING:
    from devplace.run.cuda.device_memory import DeviceMemory


def measured_memory_rows(
    predicted_bytes: Mapping[str, int], measured: Sequence[DeviceMemory]
) -> list[dict[str, object]]:
    """One row per device that ran something.

    Args:
        predicted_bytes: Device name -> predicted peak.
        measured: What the executor measured.

    Returns:
        Rows with the predicted peak, the measured peak of tensors and work buffers in a step, the
        most that torch reserved (what a limit on the process counts), the graph's pool, what lies
        outside torch, and the error of the prediction against the reserved peak (0.02: 2 % high).
    """
    rows: list[dict[str, object]] = []
    for found in measured:
        predicted = predicted_bytes.get(found.device, 0)
        reserved = found.reserved_peak_bytes
        rows.append(
            {
                "device": found.device,
                "predicted_bytes": predicted,
                "step_peak_bytes": found.step_peak_bytes,
                "reserved_peak_bytes": reserved,
                "pool_bytes": found.pool_bytes,
                "outside_bytes": found.outside_bytes,
                "error": predicted / reserved - 1 if reserved else None,
            }
        )
    return rows


def measured_memory_table(
    predicted_bytes: Mapping[str, int], measured: Sequence[DeviceMemory]
) -> str:
    """The rows of `measured_memory_rows` as text."""
    heads = ("device", "predicted", "in a step", "reserved", "graph", "outside", "error")
    keys = ("predicted_bytes", "step_peak_bytes", "reserved_peak_bytes", "pool_bytes")
    lines = [heads]
    for row in measured_memory_rows(predicted_bytes, measured):
        sizes = [format_bytes(int(str(row[key]))) for key in (*keys, "outside_bytes")]
        error = row["error"]
        told = f"{error:+.1%}" if isinstance(error, float) else "-"
        lines.append((str(row["device"]), *sizes, told))  # type: ignore[arg-type]
    widths = [max(len(line[k]) for line in lines) for k in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
