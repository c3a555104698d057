"""Time a placed step: back-to-back steps after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from devplace.cost.source_values import Source
from devplace.files import alone
from devplace.graph import Captured
from devplace.graph.graph import BATCH_ON
from devplace.run.executors import Executor, accelerators_used, make_executor
from devplace.schedule import make_schedule
from devplace.units import NS_PER_S

ROUNDS = 7
WARM_UP_S = 0.3
"""A GPU at its power limit lowers its clock within that time, most of the way."""
SHORTEST_ROUND_NS = 20_000_000  # shorter ones measure the wait for their end
STEPS_PER_ROUND = 5
"""At least, if there is time: training does not wait for each step either, and a round of one step
holds all of its launch."""


@dataclass(frozen=True)
class StepTiming:
    """What running a step some times gave.

    Attributes:
        step_ns: Median over rounds of the time per step.
        round_ns: Time per step of each round.
        peak_bytes: Device name -> most memory this process held there, while the step ran; GPUs
            only.
        mode: `graph` or `eager` on GPUs, `threads` on logical CPU devices.
        reason: Why it is `eager`.
    """

    step_ns: int
    round_ns: tuple[int, ...]
    peak_bytes: dict[str, int]
    mode: str
    reason: str = ""


def time_plan(
    graph: Captured,
    placement: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
    sources: Mapping[int, Source],
    seconds: float = 1.0,
    seed: int = 0,
    lock: str | None = None,
    warm_up_s: float = WARM_UP_S,
) -> StepTiming:
    """Run a placed step on made-up values and time it; steps are not waited for one by one.

    Args:
        graph: The captured step.
        placement: Device index per op, shape `[V]`.
        order: Per device the ops it runs, in order.
        device_names: Names of the devices.
        sources: What the step starts from.
        seconds: How long to time it, about, s.
        seed: Of the random ops.
        lock: File that processes measuring at once share: only one of them uses the devices at a
            time. Making steps ready beside one that was timed made times of NMT-4 on two GPUs 11
            to 19 % wrong in the median, and twofold at worst.
        warm_up_s: Time for which GPUs work before they are timed, s.

    Raises:
        ExecutionError: The step failed.
        OutOfMemoryError: (of torch) A device was too small.
    """
    schedule = make_schedule(graph, placement, order, device_names)
    executor = make_executor(schedule, seed, waits=False)
    with alone(lock):
        try:
            fill(executor, sources)
            names = accelerators_used(schedule)
            for name in names:
                torch.cuda.reset_peak_memory_stats(name)
            batch = batch_of(graph, sources)
            rounds = time_executor(executor, seconds, warm_up_s if names else 0.0, batch)
            peaks = {name: int(torch.cuda.max_memory_reserved(name)) for name in names}
        finally:
            executor.close()
    mode = getattr(executor, "mode", "threads")
    reason = getattr(executor, "reason", "")
    return StepTiming(median_ns(rounds), rounds, peaks, mode, reason)


def fill(executor: Executor, sources: Mapping[int, Source]) -> None:
    """Put a value into every source op."""
    names = accelerators_used(executor.schedule)
    device = names[0] if names else "cpu"
    for op, source in sources.items():
        if op in executor.schedule.holders:
            executor.put(op, source.make(device))


def batch_of(graph: Captured, sources: Mapping[int, Source]) -> dict[int, Any]:
    """A batch's inputs by source op, where the example lay: on the host, or on a GPU."""
    home = graph.meta.get(BATCH_ON, "cpu")
    inputs = {op: source for op, source in sources.items() if source.kind == "input"}
    return {op: source.make(home) for op, source in inputs.items()}


def time_executor(
    executor: Executor,
    seconds: float,
    warm_up_s: float = 0.0,
    batch: Mapping[int, Any] | None = None,
) -> tuple[int, ...]:
    """Time per step over rounds of steps, ns; sources must have been put.

    Args:
        executor: Runs them.
        seconds: How long to time, about, s.
        warm_up_s: For how long steps are run before, s.
        batch: Inputs by source op, brought in anew before each step.
    """
    held = executor.schedule.holders
    inputs = {op: value for op, value in (batch or {}).items() if op in held}
    number = 0

    def run() -> None:
        nonlocal number
        number += 1
        for op, value in inputs.items():
            executor.put(op, value)
        executor.step(number)

    return time_steps(run, getattr(executor, "synchronize", lambda: None), seconds, warm_up_s)


def time_steps(
    run: Callable[[], Any], wait: Callable[[], Any], seconds: float, warm_up_s: float = 0.0
) -> tuple[int, ...]:
    """Time per step of each round, ns.

    Args:
        run: Starts a step.
        wait: Waits for all steps started.
        seconds: How long to time, about, s; at least two steps are timed, after one.
        warm_up_s: For how long steps are run before, s; the last one may end later.
    """
    run()  # makes CUDA graphs, loads kernels
    wait()
    until = time.monotonic() + warm_up_s
    while time.monotonic() < until:
        _round_ns(run, wait, 1)
    once_ns = max(1, _round_ns(run, wait, 1))
    affordable = int(seconds * NS_PER_S) // once_ns
    if affordable < ROUNDS:
        return (once_ns, *(_round_ns(run, wait, 1) for _ in range(max(1, affordable - 1))))
    wanted = max(STEPS_PER_ROUND, -(-SHORTEST_ROUND_NS // once_ns))
    steps = min(affordable // ROUNDS, wanted)
    return tuple(_round_ns(run, wait, steps) for _ in range(ROUNDS))


def median_ns(rounds: Sequence[int]) -> int:
    """The median, a whole number."""
    return round(statistics.median(rounds))


def _round_ns(run: Callable[[], Any], wait: Callable[[], Any], steps: int) -> int:
    begin = time.perf_counter_ns()
    for _ in range(steps):
        run()
    wait()
    return (time.perf_counter_ns() - begin) // steps
