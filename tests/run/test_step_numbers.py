"""Which step comes next, by which its random numbers are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import devplace as dp
from devplace.errors import PlanMismatchError
from tests.run.models import mean_square
from tests.run.placed import adam, at_random, make_step, sgd, train_eager


def plain_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.0)


def still_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def still_adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.0)


class Noisy(nn.Module):
    """Its output is a linear layer's, with half of it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 32)

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(self.linear(x), 0.5)


@pytest.mark.parametrize("make", [plain_sgd, still_sgd, still_adam])
def test_steps_that_take_turns_never_draw_the_same_numbers_twice(make: Callable[..., Any]) -> None:
    """`sync` and `load` in every step, as of two steps over one model, keep noise fresh."""
    model, batch = Noisy(), (torch.ones(4, 6),)
    step = make_step(model, batch, mean_square, make(list(model.parameters())), at_random(0))
    losses = set()
    for number in range(5):
        assert step.steps_done == number
        losses.add(float(step(*batch)))
        step.sync()
        step.load()
    assert len(losses) == 5


@pytest.mark.slow
def test_outputs_without_an_optimizer_stay_random_after_loading() -> None:
    """Dropout kept on in inference draws other masks after other weights were loaded."""
    model, x = Noisy(), torch.ones(4, 6)
    with dp.parallelize(model, x, machine=2, budget="5ev", confirm=False) as infer:
        first = infer(x)
        infer.load()
        assert not torch.equal(infer(x), first)


def test_trying_a_step_out_does_not_count() -> None:
    """`parallelize` runs a step some times; training begins with the same numbers each time."""
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        model, x = Noisy(), torch.ones(4, 6)
        with dp.parallelize(model, x, machine=1, budget="5ev", confirm=False) as infer:
            outputs.append(infer(x))
    assert torch.equal(*outputs)


def test_groups_with_and_without_momentum_are_loaded_again() -> None:
    """Only some parameters have state that tells of steps made."""

    def make(model: Any) -> Any:
        groups = [
            {"params": model[0].parameters(), "momentum": 0.9},
            {"params": [*model[1:].parameters()]},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    batches = [(torch.randn(5, 3),) for _ in range(4)]
    step = make_step(model, batches[0], mean_square, make(model), at_random(1))
    losses = []
    for batch in batches:
        losses.append(float(step(*batch)))
        step.sync()
        step.load()
    assert losses == pytest.approx(train_eager(twin, make(twin), batches, mean_square), rel=1e-5)


def test_dampening_begins_anew_with_the_momentum() -> None:
    """SGD's first step takes the whole gradient, later ones a part of it."""

    def make(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    start = {key: value.clone() for key, value in model.state_dict().items()}
    batches = [(torch.randn(5, 3),) for _ in range(3)]
    expected = train_eager(twin, make(twin), batches, mean_square)
    optimizer = make(model)
    fresh = optimizer.state_dict()
    step = make_step(model, batches[0], mean_square, optimizer, at_random(1))
    for _ in range(2):
        model.load_state_dict(start)
        optimizer.load_state_dict(fresh)
        step.load()
        assert [float(step(*batch)) for batch in batches] == pytest.approx(expected, rel=1e-5)
        step.sync()


@pytest.mark.parametrize("make", [sgd, adam])
def test_momentum_of_some_parameters_only_is_refused(make: Callable[..., Any]) -> None:
    """One step number serves all: it is the first step of all, or of none."""
    model, batch = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (torch.randn(5, 3),)
    optimizer = make(list(model.parameters()))
    step = make_step(model, batch, mean_square, optimizer, at_random(1))
    step(*batch)
    step.sync()
    del optimizer.state[model[1].bias]
    with pytest.raises(PlanMismatchError, match=r"same number of steps since capture: .*'1\.bias'"):
        step.load()
