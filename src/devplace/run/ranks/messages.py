"""Tensors as messages between processes: their strides, then their elements without gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from devplace.run.copies import CACHE_LINE_BYTES, copied_strides

_NUMBER_BYTES = 8


def message_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Length of the message of a tensor, bytes."""
    return _header_bytes(len(shape)) + math.prod(shape) * int(dtype.itemsize)


def pack(value: Any) -> Any:
    """A tensor as bytes, of which `unpack` makes a tensor laid out as `clone_tensor` would a copy.

    Returns:
        A uint8 tensor on the CPU, shape `[message_bytes]`.
    """
    value = value.detach()
    message = torch.empty(message_bytes(value.shape, value.dtype), dtype=torch.uint8, device="cpu")
    strides = _strides(value)
    header = message[: _NUMBER_BYTES * value.dim()].view(torch.int64)
    header.copy_(torch.tensor(strides, dtype=torch.int64, device="cpu"))
    _elements(message, value.shape, value.dtype, strides).copy_(value)
    return message


def unpack(message: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The tensor of a message; where nothing is repeated and no gaps are left, without a copy."""
    strides = message[: _NUMBER_BYTES * len(shape)].view(torch.int64).tolist()
    elements = _elements(message, shape, dtype, strides)
    if list(elements.stride()) == strides:
        return elements
    made = torch.empty_strided(tuple(shape), strides, dtype=dtype, device="cpu")
    target, source = made, elements
    for dim, stride in enumerate(strides):
        if stride == 0 and shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return made


def _header_bytes(num_dims: int) -> int:
    """Elements begin where memory of their own would: CPU kernels choose loops by that."""
    return -(-num_dims * _NUMBER_BYTES // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def _strides(value: Any) -> list[int]:
    found = None if value.is_contiguous() else copied_strides(value)
    return found or list(torch.empty_like(value, device="meta").stride())


def _elements(
    message: Any, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]
) -> Any:
    """The part of a message after the strides, as a tensor whose dimensions lie in their order."""
    flat = message[_header_bytes(len(shape)) :].view(dtype)
    dense, span = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d] > 1)):
        dense[dim], span = span, span * max(1, shape[dim])
    for dim, stride in enumerate(strides):
        if shape[dim] == 1:  # of no meaning, and kept as it was
            dense[dim] = stride
    return flat.as_strided(tuple(shape), dense)
