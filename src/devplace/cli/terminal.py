"""Escape control characters before text reaches the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


def shown(text: str) -> str:
    r"""The text with what could steer a terminal written out.

    Example:
        >>> shown("a\x1b[2Jb\n") == "a\\x1b[2Jb\n"
        True
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else _escaped(letter) for letter in text
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


class _Shown:
    """A stream that shows control characters; what writes its own, as progress bars do, takes `raw`
    (and click finds no buffer to write past it)."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(shown(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.raw, name)


def raw(stream: Any) -> Any:
    """The stream without that."""
    return stream.raw if isinstance(stream, _Shown) else stream


@contextmanager
def shows_control_characters() -> Iterator[None]:
    """Inside, stdout and stderr do so."""
    before = sys.stdout, sys.stderr
    if any(stream is None or isinstance(stream, _Shown) for stream in before):
        yield
        return
    sys.stdout, sys.stderr = _Shown(sys.stdout), _Shown(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
