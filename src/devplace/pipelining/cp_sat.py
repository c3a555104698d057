"""Run CP-SAT of OR-Tools (`devplace[exact]`) so that Ctrl-C interrupts it."""

from __future__ import annotations

import threading
from typing import Any

from devplace.errors import InputError


def cp_model() -> Any:
    """The CP-SAT module.

    Raises:
        InputError: OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model as module
    except ImportError:
        raise InputError(
            "Exact solving needs OR-Tools, which is not installed. Install devplace[exact]."
        ) from None
    return module


def solve(solver: Any, model: Any) -> int:
    """The status after solving `model` in a thread of its own.

    OR-Tools takes over Ctrl-C while it solves, and afterwards leaves a handler that ends the
    process. Here Python keeps it.

    Raises:
        KeyboardInterrupt: Ctrl-C; the solver has stopped.
    """
    solver.parameters.catch_sigint_signal = False
    status: list[int] = []
    failures: list[BaseException] = []
    # Not the thread's own end: Python may take it for ended where Ctrl-C interrupts a join.
    has_ended = threading.Event()

    def run() -> None:
        try:
            status.append(solver.solve(model))
        except BaseException as error:
            failures.append(error)
        finally:
            has_ended.set()

    thread = threading.Thread(target=run, name="CP-SAT")
    thread.start()
    try:
        while not has_ended.wait(0.1):
            pass
    except KeyboardInterrupt:
        while not has_ended.wait(0.1):
            solver.stop_search()  # again where it had not begun
        raise
    finally:
        thread.join()
    if failures:
        raise failures[0]
    return status[0]
