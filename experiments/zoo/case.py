"""One model with what it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss.

    Attributes:
        model: In training mode, without random ops unless `draws`.
        inputs: Positional inputs (a tuple) or keyword ones (a dict).
        loss_fn: `loss_fn(model, *inputs)`; None if the model's output has `.loss`.
        draws: Whether the step draws random numbers, so that only the placed step and the unplaced
            one can be compared.
        dtype: float64, or what its kernels ask for.
    """

    model: nn.Module
    inputs: Any
    loss_fn: Callable[..., Any] | None = None
    draws: bool = False
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every rate of dropout to 0, in layers and in numbers that modules keep."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name.lower() or (name == "p" and "Drop" in type(module).__name__)
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def floats(*shape: int) -> torch.Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> torch.Tensor:
    """Whole numbers below a limit."""
    return torch.randint(high, shape)


def square(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Mean square of the first floating-point tensor that a model gives."""
    return first_of(model(*args, **kwargs)).square().mean()


def first_of(output: Any) -> torch.Tensor:
    """The first floating-point tensor in an output."""
    if isinstance(output, torch.Tensor):
        return output
    parts = list(output.values()) if isinstance(output, dict) else list(output)
    found = [each for each in parts if isinstance(each, (torch.Tensor, tuple, list, dict))]
    return first_of(
        next(e for e in found if not isinstance(e, torch.Tensor) or e.is_floating_point())
    )
