"""Make `tensor.data = value` and `tensor[mask] = value` visible to a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from devplace.errors import CaptureError
from devplace.step_capture.sources import memory

with FakeTensorMode():
    _OWN = frozenset(vars(torch.empty(())))
"""What tensors without values have of their own."""


@contextlib.contextmanager
def data_written(
    sources: Mapping[str, torch.Tensor], left: Callable[[torch.Tensor, str], None] | None = None
) -> Iterator[None]:
    """Make assignments to `.data` of some tensors copies into them; a trace misses the former.

    Args:
        sources: Name -> tensor without values.
        left: Told of each that is given other memory, and its name.
    """
    names = {id(tensor): name for name, tensor in sources.items()}
    owners = {memory(tensor): name for name, tensor in sources.items()}
    original: Any = torch._C.TensorBase.data

    def get(tensor: torch.Tensor) -> Any:
        return original.__get__(tensor, type(tensor))

    def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
        name = names.get(id(tensor))
        if name is None:
            if isinstance(value, FakeTensor) and not isinstance(tensor, FakeTensor):
                raise CaptureError(
                    f"State of a step must be part of the model: .data of a tensor of shape "
                    f"{list(tensor.shape)} is assigned, which is no parameter or buffer. Keep it "
                    f"in a buffer (register_buffer), or make its module a part of the model."
                )
            original.__set__(tensor, value)
            return
        _refuse_other(name, tensor, value)
        if owners.get(memory(value), name) != name:
            raise CaptureError(
                f"Parameters and buffers must own their memory: {name!r} is given that of "
                f"{owners[memory(value)]!r} during the step. Copy it: {name}.data.copy_(...)."
            )
        if left is not None and memory(value) != memory(tensor):
            left(tensor, name)
        with torch.no_grad():
            tensor.copy_(value)

    with mock.patch.object(torch.Tensor, "data", property(get, put)):
        yield


@contextlib.contextmanager
def masks_written() -> Iterator[None]:
    """Make `x[mask] = value` one `torch.where`, if the value is one for all places and is learned.

    Its gradient would else be made of the rows that the mask picks, whose number no trace knows.
    """
    original: Any = torch.Tensor.__setitem__

    def put(tensor: torch.Tensor, key: Any, value: Any) -> None:
        wide = _one_for_all(tensor, key, value)
        if wide is None:
            original(tensor, key, value)
        else:
            mask = key.reshape(*key.shape, *(1 for _ in tensor.shape[key.ndim :]))
            tensor.copy_(torch.where(mask, wide, tensor))

    with mock.patch.object(torch.Tensor, "__setitem__", put):
        yield


def _one_for_all(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor | None:
    """What is put in every place of a mask, if it is learned; else None."""
    is_mask = isinstance(key, torch.Tensor) and key.dtype is torch.bool
    if not is_mask or key.shape != tensor.shape[: key.ndim]:
        return None
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    rest = tensor.ndim - key.ndim
    if value.ndim == rest + 1 and value.shape[0] == 1:
        value = value.squeeze(0)
    return value if value.ndim <= rest and value.dtype == tensor.dtype else None


def refuse_other_buffers(before: Mapping[str, torch.Tensor], after: Mapping[str, Any]) -> None:
    """Refuse buffers that are of another shape or dtype after the step, or no tensor.

    Raises:
        CaptureError: Names one.
    """
    for name, tensor in before.items():
        _refuse_other(name, tensor, after[name])


def _refuse_other(name: str, before: torch.Tensor, after: Any) -> None:
    if not isinstance(after, torch.Tensor):
        raise CaptureError(
            f"Buffers must stay tensors: {name!r} is {type(after).__name__} after the step. Write "
            f"into it instead."
        )
    was, now = ((list(t.shape), str(t.dtype).removeprefix("torch.")) for t in (before, after))
    if was != now:
        raise CaptureError(
            f"Buffers must keep their shape and dtype: {name!r} is {was[1]} of shape {was[0]} "
            f"before the step and {now[1]} of shape {now[0]} after it. Give it its last shape and "
            f"dtype from the start, and write into it."
        )


def refuse_attributes(
    tensors: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> None:
    """Refuse what a step has put on a parameter or buffer itself: `.grad`, or another attribute.

    Args:
        tensors: Name -> tensor of a trace.
        before: Name -> parameter of the user's.

    Raises:
        CaptureError: Names one.
    """
    for name, tensor in tensors.items():
        own = [key for key in vars(tensor) if key not in _OWN and not key.startswith("_")]
        own += ["grad"] * (tensor.is_leaf and tensor.grad is not None)
        is_other = name in before and tensor.requires_grad != before[name].requires_grad
        own += ["requires_grad"] * is_other
        if own:
            raise CaptureError(
                f"Attributes of parameters and buffers are fixed during a step: .{own[0]} of "
                f"{name!r} is set in it, and would be lost. Keep it in a buffer (register_buffer), "
                f"put into the loss what is to be trained with, and freeze parameters outside."
            )
