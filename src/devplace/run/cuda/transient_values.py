"""Values of a step that is only tried, with the large ones made anew for every op that reads one.

Layouts and kernels do not depend on what floating-point tensors hold, so a step can be tried in
hardly more memory than its largest op takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from devplace.graph import OpGraph
from devplace.run.cuda.packing import num_span_elements

# Storages from this size on are not kept, bytes; torch has smaller ones in pieces of their own.
LIGHT_BYTES = 2**20
# In the domain of logarithm, root, quotient and inverse sine.
STAND_IN = 0.5


@dataclass(frozen=True)
class Described:
    """A tensor without its memory.

    Attributes:
        like: Meta tensor with its shape, strides and dtype.
        device: Its torch device.
        offset: Where it begins in its storage, elements.
        num_elements: Elements of the storage.
    """

    like: Any
    device: Any
    offset: int
    num_elements: int

    def made(self) -> Any:
        """A tensor laid out like it."""
        storage = torch.full(
            (self.num_elements,), STAND_IN, dtype=self.like.dtype, device=self.device
        )
        return storage.as_strided(self.like.shape, self.like.stride(), self.offset)


class LightValues(dict[int, Any]):
    """Tensor -> its value; large floating-point ones are described, and made anew when read.

    Integers stay as they are: among them are indices, which must be in range.

    Args:
        graph: The step.
        held: Tensors that are there anyhow; values in their memory stay as they are.
    """

    def __init__(self, graph: OpGraph, held: Iterable[Any] = ()) -> None:
        super().__init__()
        self._held = {value.untyped_storage().data_ptr() for value in held}
        # as_strided speaks of the whole storage; other readers need no more than the tensor.
        self._whole = {
            tensor for op in graph.ops if "as_strided" in op.target for tensor in op.inputs
        }

    def __setitem__(self, tensor: int, value: Any) -> None:
        is_described = isinstance(value, torch.Tensor) and (
            value.untyped_storage().data_ptr() not in self._held
        )
        described = lightened(value, tensor in self._whole) if is_described else value
        super().__setitem__(tensor, described)

    def __getitem__(self, tensor: int) -> Any:
        value = super().__getitem__(tensor)
        return value.made() if isinstance(value, Described) else value


def lightened(value: Any, is_whole: bool = False) -> Any:
    """The description of a tensor if it is large and floating-point, else the tensor.

    Args:
        value: The tensor.
        is_whole: Whether its whole storage is to be made again, or just the part that it covers.
    """
    storage_bytes = value.untyped_storage().nbytes()
    if not value.is_floating_point() or storage_bytes < LIGHT_BYTES:
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if is_whole:
        num_elements = storage_bytes // value.element_size()
        return Described(like, value.device, value.storage_offset(), num_elements)
    return Described(like, value.device, 0, num_span_elements(value))
