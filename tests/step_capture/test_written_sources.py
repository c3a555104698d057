"""Parameters and buffers that forward writes in place, through `.data`, or replaces."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.run.placed import (
    adam,
    at_random,
    compare_with_eager,
    largest_difference,
    make_step,
    sgd,
    train_eager,
)
from torch import nn
from torch.nn import functional as F

from devplace.errors import CaptureError
from devplace.step_capture import capture


def batches() -> list[tuple[Any, Any]]:
    torch.manual_seed(1)
    data = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(4)]
    return [(x.double(), y) for x, y in data]


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


class Momentum(nn.Module):
    """A frozen copy follows the trained layer, as in MoCo and BYOL."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fast, self.kind = nn.Linear(4, 3), kind
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(3))

    def follow(self) -> None:
        for new, old in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
            if self.kind == "data":
                old.data = old.data * 0.9 + new.data * 0.1
            elif self.kind == "data in place":
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            else:
                old.lerp_(new, 0.1)
        if self.kind == "vector":
            vector = nn.utils.parameters_to_vector(self.slow.parameters()) * 0.9
            nn.utils.vector_to_parameters(vector, self.slow.parameters())

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.follow()
            target = self.slow(x)
        self.centre.data = 0.5 * self.centre.data + 0.5 * target.mean(0)
        return self.fast(x) + (target - self.centre).square()


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("kind", ["data", "data in place", "in place", "vector"])
def test_a_slow_copy_follows_as_in_eager(kind: str, make: Any) -> None:
    """However forward writes to frozen parameters and buffers."""
    compare_with_eager(Momentum(kind).double(), batches(), loss_fn, make, at_random(0))


@pytest.mark.parametrize("make", [sgd, adam])
def test_frozen_parameters_that_change_count_no_steps(make: Any) -> None:
    """The optimizer holds them, but does not update them: they get no state, loading works."""
    model = Momentum("in place").double()
    twin = copy.deepcopy(model)
    optimizer, other = make(list(model.parameters())), make(list(twin.parameters()))
    step = make_step(model, batches()[0], loss_fn, optimizer, at_random(1))
    for batch in batches():
        step(*batch)
        step.sync()
        step.load()
    train_eager(twin, other, batches(), loss_fn)
    assert largest_difference(model, twin) < 1e-9
    held = [
        [sorted(o.state.get(p, {})) for p in o.param_groups[0]["params"]]
        for o in (optimizer, other)
    ]
    assert held[0] == held[1]


class Writing(nn.Module):
    """Puts something else in place of a parameter or buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(4, 3), kind
        self.twin = nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("memory", torch.zeros(0, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        if self.kind == "grows":
            self.memory = torch.cat([self.memory, x])[-9:]
        elif self.kind == "data grows":
            self.memory.data = x
        elif self.kind == "dtype":
            self.count = self.count + 0.5
        elif self.kind == "none":
            self.memory = None
        elif self.kind == "shared":
            self.twin.weight.data = self.head.weight.data
        return self.head(x) + self.twin(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("grows", r"'memory' is float32 of shape \[0, 4\] before .* of shape \[6, 4\] after"),
        ("data grows", r"'memory' is float32 of shape \[0, 4\] before .* of shape \[6, 4\] after"),
        (
            "dtype",
            r"'count' is int64 of shape \[\] before the step and float32 of shape \[\] after",
        ),
        ("none", "'memory' is NoneType after the step"),
        ("shared", r"'twin\.weight' is given that of 'head\.weight'"),
    ],
)
def test_sources_that_are_others_after_the_step_are_refused(kind: str, message: str) -> None:
    """The next step would need another graph; the model stays as it was."""
    model = Writing(kind)
    state = copy.deepcopy(model.state_dict())
    x, y = batches()[0]
    with pytest.raises(CaptureError, match=message):
        capture(model, (x.float(), y), loss_fn, sgd(list(model.parameters())))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert "data" not in vars(torch.Tensor)


class Late(nn.Module):
    """Assigns to the data of a weight that backward still needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        out = self.second(self.first(x))
        self.second.weight.data = self.second.weight.data * 0.5
        return out


def test_data_of_a_weight_that_backward_needs_is_not_assigned_unseen() -> None:
    """In eager mode backward goes on with the old one, which a write in place has overwritten."""
    x, y = batches()[0]
    model = Late()
    with pytest.raises(CaptureError, match="modified by an inplace operation"):
        capture(model, (x.float(), y), loss_fn, sgd(list(model.parameters())))
