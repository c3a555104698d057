"""Learning curves as CSV, and for TensorBoard where it is installed."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Curves:
    """One row of numbers per update, on disk at once.

    Args:
        folder: Where `curves.csv` and TensorBoard's files go.
        kept: Rows of an earlier run to keep; it goes on behind them.
        evaluations: That the last of them counts; TensorBoard hides what comes later.
    """

    def __init__(self, folder: Path, kept: int = 0, evaluations: int = 0) -> None:
        self.rows = kept
        self._path = folder / "curves.csv"
        self._columns: list[str] = []
        old = self._path.read_text().splitlines(keepends=True)[: kept + 1] if kept else []
        self._path.write_text("".join(old))
        if old:
            self._columns = next(csv.reader(old[:1]))
        self._board = _board(folder, evaluations + 1 if kept else None)

    def add(self, row: dict[str, Any]) -> None:
        """Write a row; the first decides the columns."""
        if not self._columns:
            self._columns = list(row)
            self._write(self._columns)
        self._write([row[name] for name in self._columns])
        self.rows += 1
        if self._board is not None:
            for name, value in row.items():
                if value is not None and name != "evaluations":
                    self._board.add_scalar(name, float(value), row["evaluations"])

    def close(self) -> None:
        """End TensorBoard's file."""
        if self._board is not None:
            self._board.close()

    def _write(self, values: list[Any]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(values)


def _board(folder: Path, purge_step: int | None) -> Any:
    """TensorBoard's writer, or None where it is not installed."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge_step)
