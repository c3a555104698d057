"""Ctrl-C in the midst of something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def ctrl_c(when: Callable[[], bool]) -> Iterator[None]:
    """Send Ctrl-C to the main thread once something is so; the block must end by it."""
    main, is_over = threading.main_thread().ident or 0, threading.Event()

    def send() -> None:
        while not is_over.wait(0.01):
            if when():
                signal.pthread_kill(main, signal.SIGINT)
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        is_over.set()
        sender.join()
