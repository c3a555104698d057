"""Modules that a step moves or casts: nothing happens where they are so already."""

from __future__ import annotations

import pytest
import torch
from tests.step_capture.placed_steps import assert_as_eager
from torch import nn

import devplace as dp


class Router(nn.Module):
    """A layer that is put where its input is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), how
        self.rnn = nn.GRU(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "to":
            self.layer = self.layer.to(x.dtype)
        elif self.how == "double":
            self.layer.double()
            self.rnn.to(x)
        elif self.how == "float":
            return self.layer.float()(x.float()).double()[:, :3]
        elif self.how == "made inside":
            x = nn.LayerNorm(8).to(x)(x)
        return self.rnn(self.layer(x))[0]


def made(how: str) -> tuple[Router, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Router(how).double(), (torch.randn(5, 8).double(), torch.randint(3, (5,)))


def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 2.0, 3.0])
    return nn.CrossEntropyLoss(weight).to(x)(m.to(x.device)(x), y)


@pytest.mark.parametrize("how", ["to", "double", "made inside", "not"])
def test_modules_moved_to_where_they_are(how: str) -> None:
    """Their parameters stay the model's; a criterion may be moved, too."""
    assert_as_eager(*made(how), loss)


def test_a_module_cast_in_a_step_is_named_and_stays_as_it_was() -> None:
    """A parameter of another dtype would be another parameter."""
    model, batch = made("float")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dp.errors.CaptureError, match=r"'layer.0.weight' goes from float64 to") as e:
        dp.capture(model, batch, loss, optimizer)
    assert "before it is captured" in str(e.value)
    assert all(p.dtype is torch.float64 for p in model.parameters())
