"""Make `layer.to(...)` inside a step visible to a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from devplace.errors import CaptureError


@contextlib.contextmanager
def modules_stay(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let `to`, `float` and the like of a module keep the parameters that they do not change.

    torch itself puts a new parameter in place of each, which a trace cannot follow.

    Args:
        parameters: Name -> the model's parameter, without values.

    Raises:
        CaptureError: One would become another: names it, its old dtype and the new one.
    """
    names = {id(tensor): name for name, tensor in parameters.items()}

    def apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                made = fn(parameter)
            if made is parameter:
                continue
            if id(parameter) in names:
                raise _changed(names[id(parameter)], parameter, made)
            module._parameters[key] = torch.nn.Parameter(made, parameter.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = fn(buffer)
        return module

    with mock.patch.object(torch.nn.Module, "_apply", apply):
        yield


def _changed(name: str, before: torch.Tensor, after: torch.Tensor) -> CaptureError:
    was, now = (str(tensor.dtype).removeprefix("torch.") for tensor in (before, after))
    what = f"{name!r} goes from {was} to {now}" if was != now else f"{name!r} is made anew"
    return CaptureError(
        f"Parameters must keep their dtype and device in a step: {what}, as a module is moved or "
        f"cast in it (module.to, .float, .half). Move or cast the model before it is captured, or "
        f"the input to the module's dtype instead."
    )
