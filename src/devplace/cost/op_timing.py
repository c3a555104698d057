"""Time one op on a device of this computer, and measure its workspace."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from devplace.cost import streams
from devplace.cost.made_up_inputs import Arguments
from devplace.cost.op_signature import OpCall

MAX_BYTES = 4 * 2**30
# Repetitions of an op in one CUDA graph: enough that launching the graph does not show (a few us).
CHAIN_NS = 1_000_000
MAX_CHAIN, MIN_CHAIN = 160, 4
MAX_REPLAYS, MIN_REPLAYS = 5, 2
REPLAYS_NS = 5_000_000
CPU_NS = 3_000_000


class Timing(NamedTuple):
    """What timing an op gave.

    Attributes:
        ns: Time it occupies the device in a chain of ops, gap to the next one included.
        workspace_bytes: Memory it takes while it runs beside inputs and outputs.
        loading_s: Time of its first call, which loads kernels and libraries, s.
    """

    ns: int
    workspace_bytes: int = 0
    loading_s: float = 0.0


def time_on_cuda(call: OpCall, device: Any, real: Mapping[int, Any] | None = None) -> Timing:
    """Time an op inside a CUDA graph that repeats it.

    Ops that no graph can hold are timed by events around single calls.

    Args:
        call: The op.
        device: A GPU.
        real: Values of some of its tensors, see `Arguments`.

    Raises:
        RuntimeError: The op cannot run on this device with such arguments.
    """
    device = torch.device(device)
    stream = streams.take(str(device))
    try:
        return _timed(call, device, stream, real)
    finally:
        streams.give_back(stream)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if cached > torch.cuda.get_device_properties(device).total_memory // 8:
            torch.cuda.empty_cache()  # every graph had a pool of its own


def _timed(call: OpCall, device: Any, stream: Any, real: Mapping[int, Any] | None) -> Timing:
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    budget = min(MAX_BYTES, free_bytes(device) // 4)
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
        arguments = Arguments(call, device, 2 * cache, budget, real=real)
        loading_s = _first(arguments, stream)
        alone_ns, workspace, made = _alone(arguments, stream, device)
        most = budget // max(1, made + workspace)
        chain = max(MIN_CHAIN, min(MAX_CHAIN, most, CHAIN_NS // max(1, alone_ns)))
        chain = max(chain, min(arguments.copies, most))  # each copy is read once a replay
        keeps = made >= 2**20 and chain <= most
        replays = max(MIN_REPLAYS, min(MAX_REPLAYS, REPLAYS_NS // max(1, chain * alone_ns)))
        try:
            graph = recorded([arguments] * chain, keeps)
            return Timing(_replayed(graph, stream, chain, replays), workspace, loading_s)
        except RuntimeError:
            torch.cuda.synchronize(device)
            return Timing(alone_ns, workspace, loading_s)


def _first(arguments: Arguments, stream: Any = None) -> float:
    """Time of a first call, s."""
    begin = time.monotonic()
    arguments.run(0)
    if stream is not None:
        stream.synchronize()
    return time.monotonic() - begin


def free_bytes(device: Any) -> int:
    """Memory that this process may still take of a GPU, what torch has cached unused included.

    A fraction set with `torch.cuda.set_per_process_memory_fraction` is kept to.
    """
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device)) - allocated
    return int(max(0, min(free + cached, limit)))


def _alone(arguments: Arguments, stream: Any, device: Any) -> tuple[int, int, int]:
    """Time of one call, its workspace and the bytes it makes."""
    stream.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin.record(stream)
    made = arguments.run(1)
    end.record(stream)
    stream.synchronize()
    made_bytes = torch.cuda.memory_allocated(device) - before
    workspace = torch.cuda.max_memory_allocated(device) - before - made_bytes
    del made
    return round(begin.elapsed_time(end) * 1e6), max(0, workspace), max(0, made_bytes)


def recorded(calls: Sequence[Arguments], keeps: bool = False) -> Any:
    """A CUDA graph, recorded on the current stream, of ops one after another.

    Args:
        calls: Arguments of each; what comes again has its next copy then.
        keeps: Whether every result has memory of its own, so that they are not all written to the
            same place in the cache.

    Raises:
        RuntimeError: No graph can hold the ops.
    """
    graph = torch.cuda.CUDAGraph()
    kept: list[Any] = []
    numbers: dict[int, int] = {}
    graph.capture_begin(capture_error_mode="relaxed")
    try:
        for arguments in calls:
            number = numbers[id(arguments)] = numbers.get(id(arguments), -1) + 1
            made = arguments.run(number)
            if keeps:
                kept.append(made)
    finally:
        _end(graph)
    return graph


def _replayed(graph: Any, stream: Any, count: int, replays: int) -> int:
    """Least time of an op in replays of a graph of so many."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    events[0].record(stream)
    for event in events[1:]:
        graph.replay()
        event.record(stream)
    stream.synchronize()
    spans = [a.elapsed_time(b) for a, b in pairwise(events)]
    return int(max(1, round(min(spans) * 1e6 / count)))


def _end(graph: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a graph that stayed empty because an op failed
            graph.capture_end()
    except RuntimeError as error:
        raise RuntimeError(f"no CUDA graph can hold the op: {error}") from error


def time_on_cpu(call: OpCall, threads: int, real: Mapping[int, Any] | None = None) -> Timing:
    """Time an op on the CPU: median of calls that last 3 ms together, three at least.

    Args:
        call: The op.
        threads: Threads it may use.
        real: Values of some of its tensors, see `Arguments`.

    Raises:
        RuntimeError: The op cannot run on a CPU.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            arguments = Arguments(call, "cpu", 0, MAX_BYTES, real=real)
            loading_s = _first(arguments)
            spans: list[int] = []
            while len(spans) < 3 or (sum(spans) < CPU_NS and len(spans) < 200):
                begin = time.perf_counter_ns()
                made = arguments.run(len(spans))
                spans.append(time.perf_counter_ns() - begin)
                del made
    finally:
        torch.set_num_threads(before)
    return Timing(max(1, sorted(spans)[len(spans) // 2]), loading_s=loading_s)
