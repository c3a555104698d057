"""Hints for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest of `known`, or an empty text if none is close.

    Example:
        >>> did_you_mean("h100x", ["h100x4", "v100x4"])
        " Did you mean 'h100x4'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
