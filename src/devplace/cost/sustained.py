"""Times of ops in a GPU that works without a pause, where its power limit may lower the clocks.

Ops are timed one at a time, with pauses between them, so at the highest clock. Whole steps of large
bf16 products take a card to its power limit: on an H200 the clock fell from 1,980 to 1,700 MHz
within a second, and a step of GPT-2 took 68 ms for the 64 of its first. How far the clock falls
depends on what is mixed, so the ops that matter most are run in the proportion of the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from devplace.cost import streams
from devplace.cost.inputs import Arguments
from devplace.cost.signature import OpCall
from devplace.cost.timing import chained, free_bytes

LOOP_NS = 40_000_000
"""Time of one round of the mix, about."""
SUSTAINED_S = 1.0
KEPT_ROUNDS = 8
"""Rounds at the end that are timed."""
LEAST_RATIO, MOST_RATIO = 1.0, 2.0


def slow_downs(calls: Sequence[OpCall], total_ns: Sequence[int], device: str) -> list[float]:
    """By what factor each call takes longer in a mix of all that goes on without a pause.

    Args:
        calls: Calls that can be timed on the device.
        total_ns: Time of each in one step, all its ops together, ns.
        device: Name of the torch device.

    Returns:
        A factor from 1 to 2 for each; all 1 where the mix cannot be run.
    """
    stream = streams.take(device)
    torch_device = torch.device(device)
    try:
        with torch.cuda.device(torch_device), torch.cuda.stream(stream), torch.no_grad():
            return _slow_downs(calls, total_ns, torch_device, stream)
    except RuntimeError:  # no room, or an op that no graph can hold
        torch.cuda.synchronize(torch_device)
        return [1.0] * len(calls)
    finally:
        streams.give_back(stream)
        torch.cuda.empty_cache()


def _slow_downs(
    calls: Sequence[OpCall], total_ns: Sequence[int], device: Any, stream: Any
) -> list[float]:
    room = free_bytes(device) // 2 // max(1, len(calls))
    graphs, alone, kept = [], [], []
    for call, total in zip(calls, total_ns, strict=True):
        arguments = Arguments(call, device, 0, room)
        arguments.run(0)
        stream.synchronize()
        once = _time(lambda arguments=arguments: arguments.run(0), stream)
        share = total / max(1, sum(total_ns)) * LOOP_NS
        graphs.append(chained(arguments, max(1, round(share / max(1, once)))))
        alone.append(min(_time(graphs[-1].replay, stream) for _ in range(3)))
        kept.append(arguments)
    until = time.monotonic() + SUSTAINED_S
    rounds: list[list[Any]] = []
    while time.monotonic() < until or len(rounds) < KEPT_ROUNDS:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        marks[0].record(stream)
        for graph, mark in zip(graphs, marks[1:], strict=True):
            graph.replay()
            mark.record(stream)
        rounds.append(marks)
        if len(rounds) > 1:
            rounds[-2][-1].synchronize()  # one round ahead, so that there is no pause
    stream.synchronize()
    found = []
    for k, before in enumerate(alone):
        spans = [marks[k].elapsed_time(marks[k + 1]) * 1e6 for marks in rounds[-KEPT_ROUNDS:]]
        found.append(min(MOST_RATIO, max(LEAST_RATIO, median(spans) / before)))
    return found


def _time(run: Any, stream: Any) -> float:
    """Time of one run after a pause, ns."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.synchronize()
    begin.record(stream)
    run()
    end.record(stream)
    stream.synchronize()
    return float(begin.elapsed_time(end) * 1e6)
