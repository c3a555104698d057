"""Measure plans in a separate process, so that a crash costs only the measurement."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from devplace.cost.graph_transport import pack
from devplace.cost.source_values import Source
from devplace.cost.worker_process import COMMAND, WorkerProcess, new_key
from devplace.errors import InputError
from devplace.graph import Captured
from devplace.plan import Plan
from devplace.tune.plan_worker import attempt
from devplace.tune.step_timing import StepTiming
from devplace.units import format_time

ATTEMPT = "devplace.tune.plan_worker:attempt"
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
    timing: StepTiming | None = None
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
        graph: The captured step the plan is of.
        sources: What the step starts from, of `step_sources`.
    """

    name: str
    plan: Plan
    graph: Captured = field(repr=False)
    sources: Mapping[int, Source] = field(repr=False)


def measure(
    trials: Sequence[Trial],
    *,
    seconds: float = 1.0,
    seed: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
    deadline: float | None = None,
    in_child: bool = True,
    command: Sequence[str] = COMMAND,
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

    Attributes:
        child: The process; None if there is to be none.
    """

    def __init__(
        self,
        seconds: float = 1.0,
        seed: int = 0,
        time_limit_s: float = TIME_LIMIT_S,
        in_child: bool = True,
        command: Sequence[str] = COMMAND,
        lock: str | None = None,
    ) -> None:
        self._settings = (seconds, seed, lock)
        self._time_limit_s = time_limit_s
        self.child = WorkerProcess(command) if in_child else None
        self._packed: dict[int, tuple[int, bytes] | None] = {}
        self._kept: list[Any] = []  # ids of graphs stay those of living ones

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the child process, so that it loads torch while this one does other work."""
        if self.child is not None and not self.child.start():
            self.child = None

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
        assert self.child is not None
        request = (_bare(trial.plan), *self._settings)
        answer = self.child.ask(ATTEMPT, *packed, request, limit)
        if answer[0] == "unreadable":  # an op of the user's, not known elsewhere
            self._packed[id(trial.graph)] = None
            return self._measure_here(trial)
        return _as_measurement(trial.name, answer)

    def close(self) -> None:
        """End the child process."""
        if self.child is not None:
            self.child.end()

    def _pack(self, trial: Trial) -> tuple[int, bytes] | None:
        """The step as bytes, with a key; None if it is to be measured in this process."""
        if self.child is None:
            return None
        key = id(trial.graph)
        if key not in self._packed:
            self._kept.append(trial.graph)
            try:
                self._packed[key] = new_key(), pack(trial.graph, trial.sources)
            except InputError:
                self._packed[key] = None
        return self._packed[key]

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
