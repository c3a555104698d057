"""Activation checkpointing: what is computed again draws the numbers of the first time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.placed_steps import assert_as_eager, losses
from torch import nn
from torch.utils.checkpoint import checkpoint

import devplace as dp
from devplace.errors import CaptureError


class Block(nn.Module):
    """Attention without dropout, and a layer with."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).flatten(2)))
        return x + torch.rand_like(x) * self.drop.p


class Net(nn.Module):
    """Three blocks, computed again in the backward pass or not."""

    def __init__(self, rate: float, is_again: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(3)).double()
        self.is_again, self.options = is_again, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.is_again:
                x = checkpoint(block, x, use_reentrant=False, **self.options)
            else:
                x = block(x)
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 5, 8).double(), torch.randn(2, 5, 8).double()


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def test_attention_without_dropout_is_no_random_op() -> None:
    """torch tags the kernel as random; without dropout it draws nothing."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(self.one, layer, x, use_reentrant=False)
            return x

        def one(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return layer(F.scaled_dot_product_attention(x, x, x))

    assert_as_eager(Attends(), batch(), loss)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.slow
def test_recomputed_dropout_draws_the_first_mask_again(fuse: bool) -> None:
    """The step with checkpointing is that without, in every bit, dropout included."""
    found = []
    for is_again in (True, False):
        model = Net(0.5, is_again)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        found.append(losses(model, batch(), loss, made, fuse=fuse))
    assert found[0] == found[1]
    assert len(set(found[0])) == 3  # other masks in every step


def test_positions_of_recomputed_draws_are_those_of_the_first() -> None:
    """In a program the op that draws again has the position of its first draw."""
    model = Net(0.5, True)
    graph = dp.capture(model, batch(), loss, torch.optim.SGD(model.parameters(), lr=0.1))
    positions = list(graph.program.random_ops.values())
    assert positions == [0, 1, 2, 3, 4, 5, 4, 2, 0]  # what nobody needs is not computed again


def test_without_kept_generators_it_draws_anew() -> None:
    """`preserve_rng_state=False` says so, in eager mode too."""
    model = Net(0.5, True, preserve_rng_state=False)
    graph = dp.capture(model, batch(), loss, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(graph.program.random_ops.values()) == list(range(9))


def test_a_seed_set_and_put_back_inside_is_refused() -> None:
    """What is drawn under it would be other numbers; the op's line is named."""

    def seeded(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        torch.manual_seed(3)
        noise = torch.rand_like(x)
        torch.set_rng_state(state)
        return F.mse_loss(model(x + noise), y)

    model = Net(0.0, False)
    message = r"must not seed torch's generator: .*test_checkpointing\.py:\d+"
    with pytest.raises(CaptureError, match=message):
        dp.capture(model, batch(), seeded, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_state_put_back_inside_draws_the_same_twice() -> None:
    """As in eager mode: antithetic noise, say."""

    def twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        first = torch.randn_like(x)
        torch.set_rng_state(state)
        return (first - torch.randn_like(x)).abs().max() + 0 * F.mse_loss(model(x), y)

    model = Net(0.0, False)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    assert losses(copy.deepcopy(model), batch(), twice, None) == [0, 0, 0]
    assert losses(model, batch(), twice, made) == [0, 0, 0]


def test_capture_leaves_the_generator_as_it_was() -> None:
    """Counting draws with its seed is not seen outside."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = Net(0.5, True)
    torch.set_rng_state(before)
    dp.capture(model, batch(), loss, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1)  # as `batch` has left it
    torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    want = torch.get_rng_state()
    torch.set_rng_state(before)
    x = batch()
    dp.capture(model, x, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(torch.get_rng_state(), want)
