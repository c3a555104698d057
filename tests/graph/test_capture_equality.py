"""Captured steps compute what eager torch.optim computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.graph.capture_checks import assert_same_training
from torch import nn

SGD_VARIANTS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.8, "weight_decay": 0.01},
    {"weight_decay": 0.1, "maximize": True},
]
ADAM_VARIANTS = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.01, "betas": (0.8, 0.95)}),
    (torch.optim.Adam, {"amsgrad": True, "eps": 1e-6}),
    (torch.optim.Adam, {"maximize": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True, "foreach": True}),
]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 4)
    )
    return net.double()


def batches(count: int = 3, rows: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 8).double(), torch.randint(0, 4, (rows,))) for _ in range(count)]


def xent(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("options", SGD_VARIANTS)
def test_sgd_variant_equals_eager(options: dict) -> None:
    """Every SGD option gives the numbers of torch.optim.SGD."""
    assert_same_training(
        small_net(), batches(), xent, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **options)
    )


@pytest.mark.parametrize(("kind", "options"), ADAM_VARIANTS)
def test_adam_variant_equals_eager(kind: type, options: dict) -> None:
    """Every Adam and AdamW option gives the numbers of torch.optim."""
    assert_same_training(
        small_net(), batches(), xent, lambda m: kind(m.parameters(), lr=0.01, **options)
    )
