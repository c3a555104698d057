"""How much slower a GPU gets that works without a pause, where its power limit lowers the clock.

Ops are timed one at a time, with pauses between them, so at the highest clock. Whole steps of large
bf16 products take a card to its power limit: on an H200 the clock fell from 1,980 to 1,700 MHz
within a second, and a step of GPT-2 took 67.5 ms for the 64.7 of its first. How far the clock falls
depends on what is mixed how, so all ops of a step are run one after another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from devplace.cost import streams
from devplace.cost.inputs import Arguments
from devplace.cost.signature import OpCall
from devplace.cost.timing import free_bytes, recorded

PAUSE_S = 0.3
SUSTAINED_S = 1.0
MOST_OPS = 4000
"""Of longer steps every second, third, ... op is run."""


def slow_down(
    calls: Sequence[OpCall], device: str, real: Mapping[str, Mapping[int, Any]] | None = None
) -> float:
    """Time of a step that is repeated without a pause, divided by its time after a pause.

    Args:
        calls: Those of the step in order, all of which can be timed on the device.
        device: Name of the torch device.
        real: Key of a call -> values of some of its tensors, see `Arguments`.

    Returns:
        A factor of at least 1; 1 where the calls cannot be run together.
    """
    stream = streams.take(device)
    torch_device = torch.device(device)
    try:
        with torch.cuda.device(torch_device), torch.cuda.stream(stream), torch.no_grad():
            some = calls[:: 1 + len(calls) // MOST_OPS]
            graph = _recorded(some, torch_device, real or {})
            return max(1.0, _ratio(graph, stream))
    except RuntimeError:  # no room, or ops that no graph can hold
        torch.cuda.synchronize(torch_device)
        return 1.0
    finally:
        streams.give_back(stream)
        torch.cuda.empty_cache()


def _recorded(calls: Sequence[OpCall], device: Any, real: Mapping[str, Mapping[int, Any]]) -> Any:
    """A CUDA graph of the calls, equal ones on the same arguments, as far as these fit in half of
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
    return recorded([ready[call.key] for call in calls if call.key in ready])


def _ratio(graph: Any, stream: Any) -> float:
    graph.replay()
    stream.synchronize()
    time.sleep(PAUSE_S)
    alone_ms = _replay_ms(graph, stream)
    until = time.monotonic() + SUSTAINED_S
    rounds = []
    while time.monotonic() < until:
        rounds.append(_replay_ms(graph, stream))
    return median(rounds[-(-2 * len(rounds) // 3) :] or rounds[-1:]) / alone_ms


def _replay_ms(graph: Any, stream: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end))
