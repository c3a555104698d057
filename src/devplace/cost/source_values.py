"""The inputs and state a step starts from, in a form that can be sent and rebuilt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from devplace.graph import Captured
from devplace.graph.program import may_be_indices

MAX_VALUE_BYTES = 1 << 26
"""Of an example's integers that are sent to the process that times ops."""


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


def source_of(kind: str, tensor: Any) -> Source:
    """A tensor as a source: with its value where that matters and is no weight's."""
    tensor = tensor.detach()
    is_weight = kind in ("parameter", "state") and tensor.is_floating_point()
    has_value = may_be_indices(tensor) and not is_weight
    value = tensor.cpu().clone() if has_value else None
    stride = torch.empty_like(tensor, device="meta").stride()  # of a dense one, if it is expanded
    return Source(kind, tuple(tensor.shape), tuple(stride), _name(tensor.dtype), value)


def example_sources(graph: Captured) -> dict[int, Source]:
    """Every source op of a captured step, with what the graph holds of its example.

    Args:
        graph: The captured step.
    """
    found = {}
    for binding in graph.program.bindings:
        tensor = graph.tensors[graph.ops[binding.op].outputs[0]]
        if binding.value is not None and tensor.num_bytes <= MAX_VALUE_BYTES:
            found[binding.op] = source_of(binding.kind, binding.value)
            continue
        stride = torch.empty(tensor.shape, device="meta").stride()
        strides = tuple(binding.strides or stride)
        found[binding.op] = Source(binding.kind, tensor.shape, strides, tensor.dtype)
    return found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
