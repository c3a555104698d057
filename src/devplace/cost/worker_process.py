"""A worker process for timing ops and running plans, restarted when it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import torch

from devplace.cost.measuring_worker import packed, read_message
from devplace.cost.settings import torch_settings

COMMAND = (sys.executable, "-m", "devplace.cost.measuring_worker")
new_key = count().__next__
"""A key for what a child is to keep."""


class WorkerProcess:
    """A measuring process: started when it is needed, and again after it has died.

    Args:
        command: Starts it.

    Attributes:
        at: What it said last that it was about to do.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.at = ""
        self._command = command
        self._process: _Process | None = None

    def start(self) -> bool:
        """Start it if it is not there, so that it loads torch while this process does other work.

        Returns:
            Whether it is there: sometimes no process may be started, or Python is embedded.
        """
        if self._process is None:
            try:
                self._process = _Process(self._command)
            except OSError:
                return False
        return True

    @property
    def is_there(self) -> bool:
        """Whether it is started and has not died."""
        return self._process is not None

    def ask(
        self, function: str, key: int, step: bytes, request: tuple[Any, ...], limit_s: float
    ) -> Any:
        """Have a function called there.

        Args:
            function: `module:name`; it is given what is kept there, the key and the request.
            key: Of the step, from `new_key`.
            step: Kept there under the key before the first request.
            request: Further arguments.
            limit_s: Longest time, start of the process included, s; then the process is ended.

        Returns:
            Its answer, or `("failed", kind, message)` if the process died (see `is_there`).
        """
        if not self.start():
            return "failed", "no process", "no process can be started"
        process = self._process
        assert process is not None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # it is a device of both processes
        answer = process.ask(function, key, step, request, limit_s)
        self.at = process.at
        if process.has_ended:
            self._process = None
        return answer

    def end(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One measuring process. Its answers are read by a thread, so that waiting can end."""

    def __init__(self, command: Sequence[str]) -> None:
        self.has_ended = False
        self.at = ""
        self._known: set[int] = set()
        self._senders: list[threading.Thread] = []
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError:
            self._stderr.close()
            raise
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._send([packed(("settings", torch_settings()))])

    def ask(
        self, function: str, key: int, step: bytes, request: tuple[Any, ...], limit_s: float
    ) -> Any:
        """See `WorkerProcess.ask`."""
        asked = packed(("do", function, key, *request))
        self._send([asked] if key in self._known else [packed(("keep", key, step)), asked])
        try:
            answer = self._answers.get(timeout=limit_s)
        except Empty:
            self.end()
            return (
                "failed",
                "time limit",
                f"it did not end within {limit_s:.3g} s; its process was ended",
            )
        except BaseException:  # the user's interrupt
            self.end()
            raise
        if answer is None:
            return self._obituary()
        self._known.add(key)
        found, is_healthy = answer
        if not is_healthy:
            self.end()
        return found

    def end(self) -> None:
        """Kill the process and wait for it."""
        self.has_ended = True
        self._process.kill()
        self._process.wait()
        for thread in (self._listener, *self._senders):
            thread.join(timeout=5)
            if thread.is_alive():
                return  # a process of the process holds the pipe
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def _send(self, messages: list[bytes]) -> None:
        """Send from a thread: a process that hangs reads nothing."""

        def send() -> None:
            if before is not None:
                before.join()
            with contextlib.suppress(OSError, ValueError):  # it has ended; the listener tells
                for message in messages:
                    self._process.stdin.write(message)  # type: ignore[union-attr]
                self._process.stdin.flush()  # type: ignore[union-attr]

        before = self._senders[-1] if self._senders else None
        sender = threading.Thread(target=send, daemon=True)
        self._senders = [sender]
        sender.start()

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while True:
                kind, *rest = read_message(stdout)
                if kind == "at":
                    (self.at,) = rest
                else:
                    self._answers.put(rest)
        except Exception:  # whatever ends the talk, or garbles it, ends the process's usefulness
            self._answers.put(None)

    def _obituary(self) -> tuple[str, str, str]:
        """How the process ended, with its last line."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        self.end()
        if code < 0:
            return "failed", "killed", f"its process was killed by {_signal_name(-code)}{said}"
        return "failed", "ended", f"its process ended with exit code {code}{said}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
