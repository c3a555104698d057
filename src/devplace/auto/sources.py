"""What a step starts from, as far as its speed depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from devplace.graph import OpGraph
from devplace.graph.capture.batch import as_call
from devplace.run.inputs import bind_inputs, bind_scalars
from devplace.run.seeds import RandomKeys
from devplace.run.state import ModelState

SMALL_BYTES = 1 << 16
"""Of tensors that are sent as they are to the process that measures."""


@dataclass(frozen=True)
class Source:
    """A source op's value: itself where values matter, else only its form.

    Attributes:
        kind: `parameter`, `buffer`, `state`, `constant`, `input` or `scalar`.
        shape, stride: Of the tensor.
        dtype: torch name without prefix.
        value: The tensor on the CPU, for integers (they are indices or masks), scalars, and small
            tensors that are no weights (indices may be made of them).
    """

    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    value: Any = None

    def make(self, device: Any) -> Any:
        """The value on a torch device; made up where only its form is known.

        Matrices of parameters get variance 1 / fan-in, other floating tensors values around 1,
        everything else zeros, which are valid indices.
        """
        if self.value is not None:
            return self.value.to(device)
        dtype = getattr(torch, self.dtype)
        made = torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)
        if not dtype.is_floating_point or dtype.itemsize < 2 or self.kind == "state":
            return made.zero_()
        if self.kind == "parameter" and len(self.shape) >= 2:
            bound = (3 * self.shape[0] / max(1, made.numel())) ** 0.5
            return made.uniform_(-bound, bound)
        return made.uniform_(0.5, 1.5)


def step_sources(
    graph: OpGraph,
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
    return {b.op: _source(b.kind, values[b.op]) for b in graph.program.bindings}


def _source(kind: str, tensor: Any) -> Source:
    tensor = tensor.detach()
    is_weight = kind in ("parameter", "state")
    is_large = is_weight or tensor.numel() * tensor.element_size() > SMALL_BYTES
    is_form_enough = tensor.is_meta or (tensor.is_floating_point() and is_large)
    value = None if is_form_enough or tensor.is_complex() else tensor.cpu().clone()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Source(kind, tuple(tensor.shape), tuple(_stride(tensor)), dtype, value)


def _stride(tensor: Any) -> Any:
    """Strides without gaps; an expanded tensor is a dense one."""
    dense = torch.empty_like(tensor, device="meta")
    return dense.stride()
