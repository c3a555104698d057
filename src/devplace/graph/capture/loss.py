"""How model, inputs and loss function become a scalar loss (or outputs)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from devplace.errors import CaptureError

LossCall = Callable[..., Any]


def loss_call(model: torch.nn.Module, loss_fn: Callable[..., Any] | None) -> LossCall:
    """Function of a batch's `(*args, **kwargs)` to what the loss function returns.

    A torch function or an `nn.Module` is applied to the output and the last positional input;
    any other function gets `(model, *args, **kwargs)`; without one, the model gives the loss.
    """
    if loss_fn is None:
        return lambda *args, **kwargs: _loss_of_output(model(*args, **kwargs))
    if not callable(loss_fn):
        raise CaptureError(
            f"loss_fn must be a function of (model, *inputs) or a torch loss, got {loss_fn!r}."
        )
    if not _is_torch_loss(loss_fn):
        return lambda *args, **kwargs: loss_fn(model, *args, **kwargs)

    def apply(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise CaptureError(
                "A torch loss needs the target as last positional input, but the example inputs "
                "are all keywords. Write loss_fn(model, **inputs) yourself."
            )
        return loss_fn(model(*args[:-1], **kwargs), args[-1])

    return apply


def _is_torch_loss(loss_fn: Callable[..., Any]) -> bool:
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, torch.nn.Module):
        return True
    return (getattr(loss_fn, "__module__", None) or "").startswith("torch.")


def _loss_of_output(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    else:
        loss = output
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(output).__name__
    raise CaptureError(
        f"Training needs a scalar loss: without loss_fn the model must return one, or an object or "
        f"dict with 'loss', but it returned {got}. Pass loss_fn=lambda model, *inputs: ..."
    )


def split_loss(returned: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss and, when the loss function returned `(loss_sum, weight)`, the weight.

    Raises:
        CaptureError: Neither a scalar nor such a pair.
    """
    loss, weight = returned, None
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        loss, weight = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = (
            f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        )
        raise CaptureError(
            f"The loss must be one number: loss_fn returned {got}. Return a scalar tensor, or a "
            f"pair (loss_sum, weight) of scalars."
        )
    if weight is not None and not isinstance(weight, torch.Tensor):
        weight = torch.tensor(float(weight), dtype=loss.dtype, device=loss.device)
    if weight is not None and weight.numel() != 1:
        raise CaptureError(
            f"loss_fn must return the loss, or a pair (loss_sum, weight) of scalars: the second "
            f"part has shape {tuple(weight.shape)}. Return the loss alone."
        )
    return _scalar(loss), _scalar(weight) if weight is not None else None


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(()) if tensor.ndim else tensor
