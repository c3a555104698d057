"""Silence C libraries on standard output, which may carry JSON."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """What is written to the process's standard output meanwhile is lost, also from C.

    Nothing happens where the process has no standard output.
    """
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    _flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def _flush() -> None:
    """Empty the buffers of Python and of C, so that each text goes where it was meant to."""
    with contextlib.suppress(Exception):  # a closed or replaced sys.stdout
        sys.stdout.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no C library by that way
        ctypes.CDLL(None).fflush(None)
