"""Tables and progress on the terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from devplace.cli.terminal import raw, shown

MIN_WIDTH = 80
"""Narrower tables would drop columns; terminals break lines themselves."""
_WHOLE = 1000  # columns within which every table of ours is whole


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Left to the command line, which ends as after `| head`; rich would exit with 1."""
        raise BrokenPipeError

    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts and tables; control characters in them are shown, not sent.

        Tables get the width that their figures need, so that none is cut; those with columns that
        fold do without.
        """
        before, whole = self.width, self.options.update(max_width=_WHOLE)
        for table in objects:
            if isinstance(table, Table) and all(c.overflow != "fold" for c in table.columns):
                self.width = max(self.width, Measurement.get(self, whole, table).minimum)
        super().print(*map(_shown, objects), **options)
        self.width = before


def _shown(item: Any) -> Any:
    if isinstance(item, str):
        return shown(item)
    if isinstance(item, Text):
        item.plain = shown(item.plain)
    if isinstance(item, Table):
        item.title, item.caption = _shown(item.title), _shown(item.caption)
        for column in item.columns:
            column.header = _shown(column.header)
            column._cells = [_shown(cell) for cell in column._cells]
    return item


def console(least: int = MIN_WIDTH, *, on_stderr: bool = False) -> Any:
    """A console that shows names of the user's as they are: nothing in them is markup.

    Args:
        least: Columns that are used in any case.
        on_stderr: Whether it is for progress, on stderr.
    """
    file = raw(sys.stderr if on_stderr else sys.stdout)
    plain = _Console(file=file, markup=False, emoji=False, highlight=False)
    plain.width = max(least, plain.width)
    return plain
