"""`tensor.data = value` of a parameter or buffer, as a write that a trace sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from devplace.errors import CaptureError
from devplace.graph.capture.sources import memory


@contextlib.contextmanager
def data_written(sources: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Make assignments to `.data` of some tensors copies into them; a trace misses the former.

    Args:
        sources: Name -> tensor without values.
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
        with torch.no_grad():
            tensor.copy_(value)

    kind: Any = torch.Tensor
    assert "data" not in vars(kind)
    kind.data = property(get, put)
    try:
        yield
    finally:
        del kind.data


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
