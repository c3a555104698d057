"""Time ops in another process, since a kernel may abort it or lose its GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from devplace.cost import op_timing, streams
from devplace.cost.graph_transport import pack, unpack
from devplace.cost.index_values import StepValues
from devplace.cost.measuring_worker import begin, free_memory
from devplace.cost.op_signature import OpCall
from devplace.cost.op_timing import Timing
from devplace.cost.source_values import example_sources
from devplace.cost.worker_process import WorkerProcess, new_key
from devplace.device_kinds import kind_of
from devplace.errors import InputError, MeasuringError
from devplace.graph import Captured

WARM_UP_S = 0.1
TIME_LIMIT_S = 60.0
"""For one op."""
START_LIMIT_S = 120.0
"""For the start of the process: imports, the user's among them, and contexts on GPUs."""
MAX_LOADING_S = 60.0
"""Of a step's ops, all in all, that does not count as measuring."""
MAX_DEATHS = 5
"""Processes that may die of ops of a step; a new one takes seconds."""


class Spot(NamedTuple):
    """Where ops are timed.

    Attributes:
        device: Name of the torch device.
        threads: Threads of a CPU.
    """

    device: str
    threads: int = 1


class RemoteTimer:
    """Times calls of a step in a measuring process, with the integers of the example batch.

    Args:
        graph: The captured step.
        spot: Where.
        child: The process; it is left as it is, but for what is of this step.
    """

    def __init__(self, graph: Captured, spot: Spot, child: WorkerProcess) -> None:
        self._graph = graph
        self._step = b""
        self._key = new_key()
        self._spot = spot
        self._child = child
        self._is_ready = False
        self._deaths = 0
        self._measuring_s = 0.0
        self._loading_s = 0.0
        self._faulty: dict[str, str] = {}

    def clock(self) -> float:
        """Time spent on measuring, s: without what processes took to start and to die, what loading
        kernels took, which every later run needs too, and what it took to compute integers."""
        return self._measuring_s + max(0.0, self._loading_s - MAX_LOADING_S)

    def __call__(self, call: OpCall) -> Timing:
        """Time a call.

        Raises:
            RuntimeError: It failed, or the process died of it.
            MeasuringError: There is no process, and there will be none.
        """
        while call.node not in self._faulty:
            self._prepare()
            begun = time.monotonic()
            request = (call.node, call.args, call.kwargs, tuple(self._faulty))
            answer = self._ask("time_call", request, TIME_LIMIT_S)
            spent_s = time.monotonic() - begun
            if answer[0] == "timed":
                timing = Timing(*answer[1])
                self._measuring_s += max(0.0, spent_s - timing.loading_s)
                self._loading_s += timing.loading_s
                return timing
            if self._child.is_there:
                self._measuring_s += spent_s
                raise RuntimeError(answer[-1])
            self._is_ready = False
            self._deaths += 1
            # It may have died of an op whose integers this one reads; that one is left out then.
            self._faulty[self._child.at or call.node] = answer[-1]
        raise RuntimeError(self._faulty[call.node])

    def slow_down(self, calls: Sequence[OpCall], step_ns: int) -> float:
        """By what factor calls of a step in order, which take so long, slow down without a pause;
        see `sustained`.

        Raises:
            RuntimeError: It cannot be told.
            MeasuringError: There is no process, and there will be none.
        """
        self._prepare()
        first = {call.key: call for call in reversed(calls)}
        number = {key: k for k, key in enumerate(first)}
        distinct = [(call.node, call.args, call.kwargs) for call in first.values()]
        sequence = [number[call.key] for call in calls]
        request = (distinct, sequence, step_ns, tuple(self._faulty))
        answer = self._ask("slow_down", request, TIME_LIMIT_S)
        if answer[0] != "slower":
            raise RuntimeError(answer[-1])
        return float(answer[1])

    def _prepare(self) -> None:
        if self._is_ready and self._child.is_there:
            return
        if self._deaths >= MAX_DEATHS:
            raise MeasuringError(f"{self._deaths} measuring processes have died")
        try:
            self._step = self._step or pack(self._graph, example_sources(self._graph))
        except InputError as error:
            raise MeasuringError(str(error)) from error
        answer = self._ask("ready", (self._spot,), START_LIMIT_S)
        if answer[0] != "ready":
            raise MeasuringError(answer[-1])
        self._is_ready = True

    def close(self) -> None:
        """Have the process forget the step."""
        if self._is_ready and self._child.is_there:
            self._ask("forget", (), TIME_LIMIT_S)
        self._is_ready = False

    def _ask(self, function: str, request: tuple[Any, ...], limit_s: float) -> Any:
        try:
            return self._child.ask(
                f"{__name__}:{function}", self._key, self._step, request, limit_s
            )
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            # An argument that cannot be sent.
            return "failed", type(error).__name__, _first_line(error)


class _Kept(NamedTuple):
    values: StepValues
    spot: Spot


def ready(kept: dict[Any, Any], key: int, spot: Spot) -> tuple[Any, bool]:
    """In the process: get ready to time calls of a step."""
    begin("")
    try:
        graph, sources = unpack(kept[key], keeps_unknown=True)
        kept[key, "timing"] = _Kept(StepValues(graph, sources, spot.device), spot)
        if kind_of(spot.device).has_graphs:
            _warm_up(spot.device)
    except Exception as error:  # whatever modules of the user's raise, or a device
        return ("failed", type(error).__name__, _first_line(error)), False
    return ("ready",), True


def time_call(
    kept: dict[Any, Any], key: int, name: str, args: Any, kwargs: Any, faulty: tuple[str, ...]
) -> tuple[Any, bool]:
    """In the process: time one call of the step."""
    values, (device, threads) = kept[key, "timing"]
    try:
        begun = time.monotonic()
        real = values.inputs_of(name, faulty)
        begin(name)
        call = OpCall(values.nodes[name].target, args, kwargs, "", name)
        before_s = time.monotonic() - begun
        if kind_of(device).has_graphs:
            found = op_timing.time_on_cuda(call, device, real)
            torch.cuda.synchronize(device)
        else:
            found = op_timing.time_on_cpu(call, threads, real)
    except Exception as error:  # whatever an op of the user's raises
        return ("failed", type(error).__name__, _first_line(error)), _is_usable(device)
    return ("timed", found._replace(loading_s=before_s + found.loading_s)), True


def slow_down(
    kept: dict[Any, Any],
    key: int,
    distinct: list[tuple[str, Any, Any]],
    sequence: list[int],
    step_ns: int,
    faulty: tuple[str, ...],
) -> tuple[Any, bool]:
    """In the process: by what factor a step slows down without a pause."""
    from devplace.cost import sustained

    values, (device, _) = kept[key, "timing"]
    try:
        calls, real = [], {}
        for number, (name, args, kwargs) in enumerate(distinct):
            real[str(number)] = values.inputs_of(name, faulty)
            target = values.nodes[name].target
            calls.append(OpCall(target, args, kwargs, str(number), name))
        begin("")
        factor = sustained.slow_down([calls[number] for number in sequence], device, step_ns, real)
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever an op of the user's raises
        return ("failed", type(error).__name__, _first_line(error)), _is_usable(device)
    return ("slower", factor), True


def forget(kept: dict[Any, Any], key: int) -> tuple[Any, bool]:
    """In the process: let go of a step."""
    for each in (key, (key, "timing")):
        kept.pop(each, None)
    free_memory()
    return ("forgotten",), True


def _is_usable(device: str) -> bool:
    """Whether a device still works: after an assert or an illegal access it never does."""
    try:
        if kind_of(device).has_graphs:
            torch.cuda.synchronize(device)
            torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _warm_up(name: str) -> None:
    """Bring the clocks up."""
    stream = streams.take(name)
    with torch.cuda.device(name), torch.cuda.stream(stream):
        matrix = torch.zeros(2048, 2048, device=name)
        until = time.monotonic() + WARM_UP_S
        while time.monotonic() < until:
            for _ in range(20):
                matrix @ matrix
            stream.synchronize()
    streams.give_back(stream)
