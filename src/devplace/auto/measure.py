"""Measure plans by running them, in a process of their own that may die of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from devplace.auto.child import attempt, read_message, write_message
from devplace.auto.settings import torch_settings
from devplace.auto.sources import Source
from devplace.auto.timing import Timing
from devplace.auto.wire import pack
from devplace.errors import InputError
from devplace.graph import OpGraph
from devplace.plan import Plan
from devplace.units import format_time

CHILD = (sys.executable, "-m", "devplace.auto.child")
TIME_LIMIT_S = 60.0
"""For one plan, the start of the process (imports, CUDA contexts) included."""


@dataclass(frozen=True)
class Measurement:
    """What running one plan gave: a time, or the reason why there is none.

    Attributes:
        name: Name of the plan.
        timing: Step time and memory; None if it failed.
        error: What went wrong, in words; empty if it was measured.
        kind: Kind of the error: `out of memory`, `killed`, `time limit`, `not tried`, or the name
            of an exception.
    """

    name: str
    timing: Timing | None = None
    error: str = ""
    kind: str = ""

    @property
    def step_ns(self) -> int | None:
        """Median step time, ns; None if it was not measured."""
        return None if self.timing is None else self.timing.step_ns

    def __str__(self) -> str:
        if self.timing is None:
            return f"{self.name}: {self.error}"
        return f"{self.name}: {format_time(self.timing.step_ns)} ({self.timing.mode})"


@dataclass(frozen=True)
class Trial:
    """A plan to measure.

    Attributes:
        name: What it is called in tables.
        plan: Placement, order and devices.
        graph: The captured step the plan is of, with its program.
        sources: What the step starts from, of `step_sources`.
    """

    name: str
    plan: Plan
    graph: OpGraph = field(repr=False)
    sources: Mapping[int, Source] = field(repr=False)


def measure(
    trials: Sequence[Trial],
    *,
    seconds: float = 1.0,
    seed: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
    deadline: float | None = None,
    in_child: bool = True,
    command: Sequence[str] = CHILD,
) -> list[Measurement]:
    """Run every plan on the devices of this computer and time it.

    In a child process whatever a plan does (crash, kill, out of memory, illegal access, hang) costs
    only its own measurement: the next plan gets a new process.

    Args:
        trials: The plans, in the order they are tried.
        seconds: How long to time each, about, s.
        seed: Of the random ops.
        time_limit_s: Longest time for one plan in a child process; then the process is ended.
        deadline: `time.monotonic()` after which no plan is begun, and the one at work ended.
        in_child: Whether to use a child process; if not, a crash is a crash of this one.
        command: Starts the child process.

    Returns:
        One measurement per trial.
    """
    with Measurer(seconds, seed, time_limit_s, in_child, command) as measurer:
        return [measurer.measure(trial, deadline) for trial in trials]


class Measurer:
    """Measures one plan after another, in a child process that is replaced when it dies.

    Args:
        seconds, seed, time_limit_s, in_child, command: As for `measure`.
        lock: File shared by measurers that work at once, so that each times its plans alone; see
            `time_plan`.
    """

    def __init__(
        self,
        seconds: float = 1.0,
        seed: int = 0,
        time_limit_s: float = TIME_LIMIT_S,
        in_child: bool = True,
        command: Sequence[str] = CHILD,
        lock: str | None = None,
    ) -> None:
        self._settings = (seconds, seed, lock)
        self._time_limit_s = time_limit_s
        self._in_child = in_child
        self._command = command
        self._child: _Child | None = None
        self._packed: dict[int, bytes | None] = {}
        self._kept: list[Any] = []  # ids of graphs stay those of living ones

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the child process, so that it loads torch while this one does other work."""
        if self._in_child and self._child is None:
            try:
                self._child = _Child(self._command)
            except OSError:  # no processes may be started here, or Python is embedded
                self._in_child = False

    def measure(self, trial: Trial, deadline: float | None = None) -> Measurement:
        """Measure one plan; see `measure`."""
        limit = self._time_limit_s
        if deadline is not None:
            limit = min(limit, deadline - time.monotonic())
        if limit <= 0:
            return Measurement(trial.name, None, "not tried: the time was up", "not tried")
        self.start()
        packed = self._pack(trial)
        if packed is None:
            return self._measure_here(trial)
        answer = self._ask(trial, packed, limit)
        if answer[0] == "unreadable":  # an op of the user's, not known elsewhere
            self._packed[id(trial.graph)] = None
            return self._measure_here(trial)
        return _as_measurement(trial.name, answer)

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _pack(self, trial: Trial) -> bytes | None:
        """The step as bytes; None if it is to be measured in this process."""
        if not self._in_child:
            return None
        key = id(trial.graph)
        if key not in self._packed:
            self._kept.append(trial.graph)
            try:
                self._packed[key] = pack(trial.graph, trial.sources)
            except InputError:
                self._packed[key] = None
        return self._packed[key]

    def _ask(self, trial: Trial, packed: bytes, limit_s: float) -> Any:
        child, key = self._child, id(trial.graph)
        assert child is not None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # it is a device of both processes
        answer = child.ask(key, packed, (_bare(trial.plan), *self._settings), limit_s)
        if child.has_ended:
            self._child = None
        return answer

    def _measure_here(self, trial: Trial) -> Measurement:
        steps = {0: (trial.graph, trial.sources)}
        answer, _ = attempt(steps, 0, _bare(trial.plan), *self._settings)
        return _as_measurement(trial.name, answer)


def _bare(plan: Plan) -> tuple[Any, Any, Any]:
    return plan.placement, plan.order, plan.device_names


def _as_measurement(name: str, answer: tuple[Any, ...]) -> Measurement:
    if answer[0] == "measured":
        return Measurement(name, answer[1])
    _, kind, message = answer
    return Measurement(name, None, message, kind)


class _Child:
    """One measuring process. Its answers are read by a thread, so that waiting can end."""

    def __init__(self, command: Sequence[str]) -> None:
        self.has_ended = False
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
        self._send([("settings", torch_settings())])

    def ask(self, key: int, packed: bytes, request: tuple[Any, ...], limit_s: float) -> Any:
        """The answer to one request: `("measured", timing)` or `("failed", kind, message)`."""
        messages = [] if key in self._known else [("step", key, packed)]
        self._send([*messages, ("measure", key, *request)])
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

    def _send(self, messages: list[Any]) -> None:
        """Send from a thread: a process that hangs reads nothing."""

        def send() -> None:
            if before is not None:
                before.join()
            with contextlib.suppress(OSError, ValueError):  # it has ended; the listener tells
                for message in messages:
                    write_message(self._process.stdin, message)  # type: ignore[arg-type]

        before = self._senders[-1] if self._senders else None
        sender = threading.Thread(target=send, daemon=True)
        self._senders = [sender]
        sender.start()

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while True:
                self._answers.put(read_message(stdout))
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
