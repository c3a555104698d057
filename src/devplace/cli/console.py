"""Tables on stdout."""

from __future__ import annotations

from typing import Any

from rich.console import Console

LEAST_WIDTH = 80
"""Narrower tables would drop columns; terminals break lines themselves."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Left to the command line, which ends as after `| head`; rich would exit with 1."""
        raise BrokenPipeError


def console(least: int = LEAST_WIDTH) -> Any:
    """A console that shows names of the user's as they are: nothing in them is markup.

    Args:
        least: Columns that are used in any case.
    """
    plain = _Console(markup=False, emoji=False, highlight=False)
    plain.width = max(least, plain.width)
    return plain
