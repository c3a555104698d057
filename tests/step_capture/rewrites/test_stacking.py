"""Gradients of weights that are used many times, by one product."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import assert_same_training, sgd
from torch import nn

from devplace.graph import OpGraph
from devplace.step_capture import capture

STEPS = 5


class Unrolled(nn.Module):
    """An LSTM cell, a plain recurrent layer without bias, and a head, once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(12, 16)
        self.mix = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = (x.new_zeros(len(x), 16), x.new_zeros(len(x), 16))
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(self.head(torch.tanh(self.mix(state[0]))))
        return torch.stack(outputs, 1)


def token_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batches(count: int = 3, rows: int = 4) -> list[Any]:
    torch.manual_seed(1)
    return [
        (torch.randn(rows, STEPS, 12).double(), torch.randint(0, 10, (rows, STEPS)))
        for _ in range(count)
    ]


def unrolled() -> nn.Module:
    torch.manual_seed(0)
    return Unrolled().double()


def calls(graph: OpGraph) -> Counter[str]:
    """How often each kind of op comes in the backward pass."""
    return Counter(op.target.split(".")[1] for op in graph.ops if op.stage == "backward")


def both(model: nn.Module, batch: Any, loss: Any, **options: Any) -> list[Counter[str]]:
    """Calls without and with stacked gradients."""
    kinds = (False, True)
    return [
        calls(capture(model, batch, loss, sgd(model), stack_gradients=kind, **options))
        for kind in kinds
    ]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_is_that_of_eager(micro_batches: int, clip: float | None) -> None:
    """Loss, parameters and state agree with torch.optim over three steps."""
    after = None if clip is None else lambda m: nn.utils.clip_grad_norm_(m.parameters(), clip)
    assert_same_training(
        unrolled(),
        batches(),
        token_loss,
        sgd,
        after_backward=after,
        micro_batches=micro_batches,
        clip_grad_norm=clip,
        stack_gradients=True,
    )


def test_each_weight_has_one_product() -> None:
    """Five steps make five products for each of four weights; stacked, one for each. Biases are
    summed once, and nothing is left to be added up for them."""
    plain, stacked = both(unrolled(), batches()[0], token_loss)
    assert plain["mm"] - stacked["mm"] == (STEPS - 1) * 4
    assert plain["sum"] - stacked["sum"] == (STEPS - 1) * 2
    assert plain["add"] - stacked["add"] == (STEPS - 1) * 6
    # rows of the cell's gates, of mix and head; inputs of cell (two), mix and head
    assert stacked["cat"] - plain["cat"] == 7


@pytest.mark.slow
def test_micro_batches_are_not_mixed() -> None:
    """Each micro-batch has its own product, so that it can be placed on its own."""
    _, once = both(unrolled(), batches()[0], token_loss)
    _, twice = both(unrolled(), batches()[0], token_loss, micro_batches=2)
    assert twice["mm"] == 2 * once["mm"]


def test_a_micro_batch_is_done_before_the_next() -> None:
    """In the order of the trace, its stacked rows are not kept while the next one is computed."""
    model, batch = unrolled(), batches()[0]
    graph = capture(model, batch, token_loss, sgd(model), micro_batches=2, stack_gradients=True)
    second = min(k for k, op in enumerate(graph.ops) if op.micro_batch == 1)
    users = {t: k for k, op in enumerate(graph.ops) for t in op.inputs}
    made = [op for op in graph.ops[:second] if op.stage == "backward" and "cat" in op.target]
    stacks = [op for op in made if len(op.inputs) == STEPS]
    assert len(stacks) == 7
    assert all(users[stack.outputs[0]] < second for stack in stacks)


@pytest.mark.slow
def test_nothing_changes_by_itself() -> None:
    """Without the option the graph is that of autograd, and tells what the option would spare."""
    model, batch = unrolled(), batches()[0]
    graph = capture(model, batch, token_loss, sgd(model))
    assert calls(graph) == both(model, batch, token_loss)[0]
    assert graph.meta["spared_by_stacking"] == (STEPS - 1) * 4
    stacked = capture(model, batch, token_loss, sgd(model), stack_gradients=True)
    assert "spared_by_stacking" not in stacked.meta


class Twice(nn.Module):
    """A layer used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(("rows", "pays"), [(7, True), (9, False)])
def test_rows_are_copied_only_where_that_is_less(rows: int, pays: bool) -> None:
    """Two uses copy 2 x (32 + 32) elements a row, and spare an addition of 32 x 32."""
    model, batch = Twice(32), (torch.randn(rows, 32),)
    plain, stacked = both(model, batch, square)
    assert plain["mm"] - stacked["mm"] == int(pays)
    assert plain["sum"] - stacked["sum"] == int(pays)


class Read(nn.Module):
    """A gradient that is read again: the penalty needs each product by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.second = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + self.first(x + 1)) + self.second(x)


def test_products_of_other_weights_stay() -> None:
    """Gradients of inputs are products with weights, which are not stacked."""
    assert_same_training(
        Read().double(),
        [(torch.randn(2, 32).double(),) for _ in range(2)],
        square,
        sgd,
        stack_gradients=True,
    )


class Generated(nn.Module):
    """Weights made by a product of their own, each used many times."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.ParameterList(torch.randn(2, 8) for _ in range(2))
        self.base = nn.Parameter(torch.randn(8, 16) / 4)
        self.back = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for code in self.codes:
            weight = code @ self.base
            for _ in range(4):
                x = torch.tanh(self.back(torch.tanh(x @ weight)))
        return x


def test_a_stacked_gradient_may_be_stacked_in_turn() -> None:
    """Sums of products are rows of the gradient of what made the weights."""
    torch.manual_seed(0)
    model, batch = Generated().double(), (torch.randn(1, 2).double(),)
    plain, stacked = both(model, batch, square)
    assert plain["mm"] - stacked["mm"] == 2 * 3 + 1 + 7  # of each weight, of base, of back
    assert_same_training(model, [batch, batch], square, sgd, stack_gradients=True)


def test_bfloat16_stacks_too() -> None:
    """Under autocast products are made in bfloat16 and added up in float32."""
    model = unrolled().float()
    batch = tuple(t.float() if t.is_floating_point() else t for t in batches()[0])
    plain, stacked = both(model, batch, token_loss, autocast=torch.bfloat16)
    assert plain["mm"] - stacked["mm"] == (STEPS - 1) * 4
