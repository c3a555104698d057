"""Time the user's own step in eager PyTorch, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.device_kinds import is_host
from devplace.graph import Captured
from devplace.run.own_step import own_loop
from devplace.step_capture.batch import as_call, open_dataclasses
from devplace.step_capture.refuse import unwrap
from devplace.tune.step_timing import WARM_UP_S, StepTiming, median_ns, time_steps
from devplace.units import format_time

SECONDS = 0.5
"""How long it is timed at a time, about."""


@dataclass(frozen=True)
class Ordinary:
    """The user's own step, timed in this process.

    Attributes:
        timing: Time of a step; None if it was not timed.
        reason: Why not.
    """

    timing: StepTiming | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.timing is None:
            return f"the ordinary step was not timed: {self.reason}"
        threads = torch.get_num_threads()
        on_host = f"{threads} thread{'s' if threads > 1 else ''}"
        how = on_host if is_host(self.timing.mode) else "one GPU"
        return (
            f"the ordinary step takes {format_time(self.timing.step_ns)} (PyTorch eagerly, {how})"
        )


def time_ordinary(
    graph: Captured,
    model: Any,
    optimizer: Any,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> Ordinary:
    """Time forward, backward and `optimizer.step` as PyTorch runs them, on the whole batch and on
    copies of all values; nothing of the user's is changed.

    Args:
        graph: The captured step; tells the loss function, clipping, autocast and device.
        model, optimizer, inputs, kwargs: Where they lie the step is run.
    """
    kind = graph.program.device
    elsewhere = _not_on(kind, model, inputs, kwargs)
    if elsewhere:
        return Ordinary(reason=elsewhere)
    wait: Callable[[], Any] = torch.get_device_module(kind).synchronize
    try:
        with own_loop(graph, model, optimizer, inputs, kwargs) as step:
            rounds = time_steps(step, wait, SECONDS, 0.0 if is_host(kind) else WARM_UP_S)
    except Exception as error:  # whatever the user's code raises
        first = (str(error).strip().splitlines() or [""])[0]
        return Ordinary(reason=f"it failed: {type(error).__name__}: {first}")
    return Ordinary(StepTiming(median_ns(rounds), rounds, {}, kind))


def _not_on(kind: str, model: Any, inputs: Any, kwargs: Any) -> str:
    """Why the step cannot be run where the model lies; empty if it can."""
    model = unwrap(model)
    leaves = pytree.tree_leaves(open_dataclasses(as_call(inputs, kwargs)))
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    other = next((t.device.type for t in tensors if t.device.type != kind), None)
    if other == "meta":
        return "the model or the batch has no values"
    return f"it is planned for {kind!r}, and tensors of it lie on {other!r}" if other else ""
