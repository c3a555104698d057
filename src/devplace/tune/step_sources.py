"""The inputs and state a step starts from, reduced to what affects its speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from devplace.cost.source_values import Source, source_of
from devplace.graph import Captured
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.seeds import RandomKeys
from devplace.run.state import ModelState
from devplace.step_capture.batch import as_call

__all__ = ["Source", "step_sources"]


def step_sources(
    graph: Captured,
    model: Any,
    optimizer: Any,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[int, Source]:
    """Every source op of a captured step, to run the step without model and optimizer.

    Args:
        graph: The captured step.
        model: The model; may be on the meta device.
        optimizer: Its optimizer, or None.
        inputs: An example batch, in a form that capture takes.
        kwargs: Named part of the batch.

    Raises:
        PlanMismatchError, InputError: Model or batch are not those of the graph.
    """
    state = ModelState(graph, model, optimizer)
    groups = None if optimizer is None else optimizer.param_groups
    values = state.present()
    values.update(bind_inputs(graph, *as_call(inputs, kwargs)))
    values.update(bind_scalars(graph, 1, groups))
    values.update(RandomKeys(graph).of_step(0, 1))
    return {b.op: source_of(b.kind, values[b.op]) for b in graph.program.bindings}
