"""A small model, its batch and steps, for the tests of what a step reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.run.placed import at_random, make_step, sgd


def plain(model: Any, x: Any, y: Any) -> Any:
    """Cross entropy of the model's output."""
    return F.cross_entropy(model(x), y)


def batch() -> tuple[Any, Any]:
    """Rows of 4 features with one of 3 classes."""
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def made(loss: Any, model: Any = None) -> Any:
    """A placed step of a model, by default of two layers."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return make_step(model, batch(), loss, sgd(list(model.parameters())), at_random(0))
