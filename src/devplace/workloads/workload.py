"""The record of a workload, and the checks that built-in and user models share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devplace.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import torch

SIZES = ("full", "small")


@dataclass(frozen=True, eq=False)
class Workload:
    """A model with one batch and its loss: all that is needed to capture a step.

    Attributes:
        name: As given on the command line (`resnet-50`, `train.py:build`).
        model: `torch.nn.Module`, in training mode if built in; as its author left it otherwise.
        inputs: Everything one step consumes, targets included; the first dimension is the batch.
            A user's workload may have a dict instead, of keyword inputs.
        loss_fn: `loss_fn(model, *inputs)` (or `**inputs`) gives the scalar loss; None: the step is
            an inference, `model(*inputs)`.
    """

    name: str
    model: torch.nn.Module
    inputs: Any
    loss_fn: Callable[..., torch.Tensor] | None


def check_size(size: str) -> None:
    """Refuse a size that is not one of `SIZES`."""
    if size not in SIZES:
        raise InputError(f"Unknown size {size!r}.{did_you_mean(size, SIZES)} Use full or small.")


def check_batch(batch: int | None) -> None:
    """Refuse a batch that is not a positive integer."""
    if batch is None:
        return
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InputError(f"batch must be a positive number of samples, got {batch!r}.")
