"""A new optimizer is one file in torch's form and one line in `KINDS`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from tests.step_capture.optimizers.test_rules import assert_same_state, batch, loss, net
from tests.step_capture.placed_steps import assert_as_eager
from torch import optim

from devplace.errors import CaptureError
from devplace.step_capture import capture
from devplace.step_capture.optimizers import traced

Tensors = Sequence[torch.Tensor]


class Lion(optim.Optimizer):
    """Chen et al. (2023), arXiv 2302.06675, in the form of torch.optim: `step` makes the state and
    calls a function of the class's name for the numbers."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            averages = [self.state[param]["exp_avg"] for param in params]
            grads = [param.grad for param in params]
            options = {key: group[key] for key in ("lr", "betas", "weight_decay")}
            lion(params, grads, averages, **options)


def lion(
    params: Tensors,
    grads: Tensors,
    averages: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """One step of every parameter, in place."""
    first, second = betas
    for param, grad, average in zip(params, grads, averages, strict=True):
        param.mul_(1 - lr * weight_decay)
        update = average.mul(first).add_(grad, alpha=1 - first).sign_()
        param.add_(update, alpha=-lr)
        average.lerp_(grad, 1 - second)


def make(model: torch.nn.Module) -> Lion:
    return Lion(model.parameters(), lr=0.01, weight_decay=0.1)


def test_without_its_line_it_is_refused_by_name() -> None:
    """With what is known."""
    model = net()
    with pytest.raises(CaptureError, match=r"Adam, .*got 'Lion'"):
        capture(model, batch(), loss, make(model))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_one_line_makes_it_one_of_all(steps_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placed step gives eager's parameters and state, from the first step and from a later."""
    monkeypatch.setitem(traced.KINDS, "lion", Lion)
    both = assert_as_eager(net(), batch(), loss, make, steps_before=steps_before)
    assert_same_state(*both, 1e-12)
