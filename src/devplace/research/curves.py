"""Learning curves as CSV, and for TensorBoard where it is installed."""

from __future__ import annotations

import csv
import io
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from devplace.errors import CheckpointError
from devplace.files import read_whole, write_whole


class Curves:
    """One row of numbers per update, on disk at once.

    Args:
        folder: Where `curves.csv` and TensorBoard's files go.
        kept: Rows of an earlier run to keep; it goes on behind them.
        evaluations: That the last of them counts; TensorBoard hides what comes later.

    Raises:
        CheckpointError: The rows to keep are not there, or damaged.
        OSError: The file cannot be written.
    """

    def __init__(self, folder: Path, kept: int = 0, evaluations: int = 0) -> None:
        self.rows = kept
        self._path = folder / "curves.csv"
        self._columns: list[str] = []
        old: list[list[str]] = []
        if kept:
            old = _read(self._path, kept)
            self._columns = old[0]
        write_whole(self._path, "".join(map(_line, old)).encode())
        self._board = _board(folder, evaluations + 1 if kept else None)

    def add(self, row: dict[str, Any]) -> None:
        """Write a row; the first decides the columns.

        Raises:
            CheckpointError: Rows before it have other columns.
        """
        lines = ""
        if not self._columns:
            self._columns = list(row)
            lines = _line(self._columns)
        if self._columns != list(row):
            raise _damaged(self._path, f"its columns are {self._columns}, expected {list(row)}")
        with self._path.open("ab") as file:  # at once, so that no kill leaves half a row
            file.write((lines + _line(list(row.values()))).encode())
        self.rows += 1
        if self._board is not None:
            for name, value in row.items():
                if value is not None and name != "evaluations":
                    self._board.add_scalar(name, float(value), row["evaluations"])

    def sync(self) -> None:
        """Put the rows on the disk: a checkpoint counts on them."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """End TensorBoard's file."""
        if self._board is not None:
            self._board.close()


def _read(path: Path, kept: int) -> list[list[str]]:
    """The columns and the first rows of a file, all of them numbers or empty."""
    try:
        lines = read_whole(path).decode().splitlines(keepends=True)[: kept + 1]
        rows = list(csv.reader(lines, strict=True))
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise _damaged(path, str(error)) from error
    if len(rows) <= kept or not lines[-1].endswith("\n"):
        raise _damaged(path, f"it has fewer whole rows than the {kept} of the checkpoint")
    if not rows[0] or not all(rows[0]) or len(set(rows[0])) < len(rows[0]):
        raise _damaged(path, f"its columns are {rows[0]}")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(rows[0]) or not all(not cell or _is_number(cell) for cell in row):
            raise _damaged(path, f"line {number} is no row of numbers")
    return rows


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _line(values: list[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot go on with the curves in {path}: {why}. To start anew, leave out resume or delete "
        f"the folder."
    )


def _board(folder: Path, purge_step: int | None) -> Any:
    """TensorBoard's writer, or None where it is not installed."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge_step)
