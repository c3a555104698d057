"""Copies of tensors that preserve memory layout, so that kernels round alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devplace.schedule import PlannedTransfer

CACHE_LINE_BYTES = 64


def clone_tensor(value: Any, _transfer: PlannedTransfer | None = None) -> Any:
    """Copy a tensor to another logical device.

    Kernels pick loops, whose results can differ in the last bit, by whether dimensions are dense
    and by how rows are aligned. A dense tensor keeps its strides. In one with gaps (a column, a
    chunk of gates) each gap shrinks but stays one: to one element where rows are shorter than a
    cache line (a column takes twice its own bytes), else so far that rows begin where they began
    in their lines; never beyond what it was.
    """
    return _copied(value, gap=1)


def pack_tensor(value: Any) -> Any:
    """Copy a tensor on its device, without gaps, its dimensions in the same order in memory.

    For GPUs: there a gap of one element would take the alignment that fast matrix kernels need.
    """
    return _copied(value, gap=0)


def laid_out(value: Any, strides: Sequence[int] | None) -> Any:
    """The tensor itself if its strides are these, else a copy with dimensions in their order.

    A captured view may only work in the layout of the capture: what was a `reshape` in the model
    is a view there. The copy has no gaps, and repeats nothing.
    """
    if strides is None or tuple(value.stride()) == tuple(strides):
        return value
    dense = None if 0 in strides else shrunk_strides(value.shape, strides, gap=0)
    if dense is None:
        return value.contiguous()
    if tuple(value.stride()) == tuple(dense):
        return value
    copied = torch.empty_strided(value.shape, dense, dtype=value.dtype, device=value.device)
    return copied.copy_(value.detach())


def as_traced(made: Any, layouts: Sequence[Sequence[int] | None]) -> Any:
    """What a kernel made, laid out as in the trace; a copy only of what is not.

    What reads it was traced for that layout: a view may fit no other, `as_strided` would read other
    elements.

    Args:
        made: A tensor, or several.
        layouts: Of `Program.layouts`.
    """
    if isinstance(made, torch.Tensor):
        return _with_strides(made, layouts[0])
    return [_with_strides(part, strides) for part, strides in zip(made, layouts, strict=True)]


def _with_strides(value: Any, strides: Sequence[int] | None) -> Any:
    if strides is None or value is None or value.stride() == strides:
        return value
    sides = zip(value.shape, value.stride(), strides, strict=True)
    if all(size == 1 or now == wanted for size, now, wanted in sides) or value.numel() == 0:
        return value
    copied = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return copied.copy_(value)


def _copied(value: Any, gap: int) -> Any:
    if value.is_contiguous():
        return value.clone()
    strides = copied_strides(value) if gap else shrunk_strides(value.shape, value.stride(), gap)
    if strides is None:
        return value.clone()
    copied = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    repeated = [d for d, stride in enumerate(strides) if stride == 0]
    source, target = value, copied
    for dim in repeated:
        source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
    return copied


def copied_strides(value: Any) -> list[int] | None:
    """Strides that `clone_tensor` gives a copy of a tensor that is not contiguous."""
    line = CACHE_LINE_BYTES // value.element_size()
    return shrunk_strides(value.shape, value.stride(), line=line)


def shrunk_strides(
    shape: Sequence[int], strides: Sequence[int], gap: int = 1, line: int = 0
) -> list[int] | None:
    """Strides with every gap between dimensions reduced to `gap` elements.

    Where elements lie in pairs, gaps are even: they can still be read as complex numbers.

    Args:
        shape: Of the tensor.
        strides: Of the tensor, elements.
        gap: Elements that stay of a gap.
        line: Elements in a cache line: after rows at least as long, so many stay that the next
            begins at the same place of its line; 0 for none.

    Returns:
        None for an empty tensor and for one whose elements overlap other than by repetition.

    Example:
        >>> shrunk_strides((8, 5), (20, 1)), shrunk_strides((3, 4), (1, 3))
        ([6, 1], [1, 3])
    """
    if 0 in shape:
        return None
    sides = list(zip(shape, strides, strict=True))
    in_pairs = any(size % 2 == 0 and stride == 1 for size, stride in sides)
    in_pairs &= all(size == 1 or stride == 1 or stride % 2 == 0 for size, stride in sides)
    shrunk = [0] * len(shape)
    span, dense, new_dense = 1, 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d] > 1)):
        if shape[dim] == 1:
            shrunk[dim] = new_dense
        elif strides[dim] != 0:
            if strides[dim] < span:
                return None
            span += strides[dim] * (shape[dim] - 1)
            shrunk[dim] = new_dense if strides[dim] == dense else new_dense + gap
            if gap and in_pairs and shrunk[dim] > 1:
                shrunk[dim] += shrunk[dim] % 2
            if shrunk[dim] > new_dense >= line > 0:
                shrunk[dim] += (strides[dim] - shrunk[dim]) % line
            dense, new_dense = strides[dim] * shape[dim], shrunk[dim] * shape[dim]
    return shrunk
