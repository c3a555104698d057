"""Slow-down of a GPU under sustained load, when its power limit lowers the clock.

Ops are timed one at a time, with pauses between them, so at the highest clock. Whole steps of large
bf16 products take a card to its power limit: on an H200 the clock stays at 1,900 MHz for the first
30 ms, and 80 ms later it is 1,520 (products alone) to 1,620 (a quarter of the time spent on sines
of a large tensor). How far it falls depends on what is mixed how, so all ops of a step are run one
after another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from devplace.cost import streams
from devplace.cost.made_up_inputs import Arguments
from devplace.cost.op_signature import OpCall
from devplace.cost.op_timing import free_bytes, recorded

PAUSE_S = 0.1
SUSTAINED_S = 1.0
SLICE_NS = 15_000_000
"""Of a step that is run after a pause, so that the clock stays high."""
MAX_OPS = 4000
"""Of longer steps every second, third, ... op is run."""


def slow_down(
    calls: Sequence[OpCall],
    device: str,
    step_ns: int,
    real: Mapping[str, Mapping[int, Any]] | None = None,
) -> float:
    """Time of a step that is repeated without a pause, divided by its time in slices with pauses
    between them.

    Args:
        calls: Those of the step in order, all of which can be timed on the device.
        device: Name of the torch device.
        step_ns: What they take together, about.
        real: Key of a call -> values of some of its tensors, see `Arguments`.

    Returns:
        A factor of at least 1; 1 where the calls cannot be run together.
    """
    stream = streams.take(device)
    torch_device = torch.device(device)
    try:
        with torch.cuda.device(torch_device), torch.cuda.stream(stream), torch.no_grad():
            some = calls[:: 1 + len(calls) // MAX_OPS]
            slices = min(len(some), 1 + step_ns // SLICE_NS)
            graphs = _recorded(some, slices, torch_device, real or {})
            return max(1.0, _ratio(graphs, stream))
    except RuntimeError:  # no room, or ops that no graph can hold
        torch.cuda.synchronize(torch_device)
        return 1.0
    finally:
        streams.give_back(stream)
        torch.cuda.empty_cache()


def _recorded(
    calls: Sequence[OpCall], slices: int, device: Any, real: Mapping[str, Mapping[int, Any]]
) -> list[Any]:
    """CUDA graphs of the calls, equal ones on the same arguments, as far as these fit in half of
    the free memory."""
    room = free_bytes(device) // 2
    ready: dict[str, Arguments] = {}
    for key, call in {call.key: call for call in calls}.items():
        arguments = Arguments(call, device, 0, 0, real=real.get(key))
        if arguments.input_bytes <= room:
            room -= arguments.input_bytes
            arguments.run(0)
            ready[key] = arguments
    torch.cuda.synchronize(device)
    some = [ready[call.key] for call in calls if call.key in ready]
    ends = [len(some) * k // slices for k in range(slices + 1)]
    return [recorded(some[begin:end]) for begin, end in pairwise(ends) if begin < end]


def _ratio(graphs: Sequence[Any], stream: Any) -> float:
    _replay_ms(graphs, stream)
    alone_ms = 0.0
    for graph in graphs:
        time.sleep(PAUSE_S)
        alone_ms += _replay_ms([graph], stream)
    until = time.monotonic() + SUSTAINED_S
    rounds = []
    while time.monotonic() < until:
        rounds.append(_replay_ms(graphs, stream))
    return median(rounds[-(-2 * len(rounds) // 3) :] or rounds[-1:]) / alone_ms


def _replay_ms(graphs: Sequence[Any], stream: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    for graph in graphs:
        graph.replay()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end))
