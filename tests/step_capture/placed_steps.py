"""Trains a model eagerly and by a placed step, and compares; used by the capture tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import devplace as dp
from devplace.graph import OpGraph
from devplace.step_capture.optimizers.several import as_one, each_of


def planned(graph: OpGraph) -> Any:
    """A plan that spreads a step over two devices."""
    machine = dp.load_machine("cpux2")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    return dp.place(problem, dp.placers.Random(), "3ev").plan


def losses(model: Any, batch: Any, loss_fn: Any, optimizer: Any, **options: Any) -> list[float]:
    """Three losses of the placed step, whose results are then in model and optimizer."""
    graph = dp.capture(model, batch, loss_fn, optimizer, **options)
    with dp.compile(graph, planned(graph)) as step:
        found = [float(step(*batch)) for _ in range(3)]
        step.sync()
    return found


def assert_as_eager(
    model: torch.nn.Module,
    batch: tuple[Any, ...],
    loss_fn: Callable[..., torch.Tensor],
    make: Callable[[torch.nn.Module], Any] = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    *,
    steps_before: int = 0,
    tolerance: float = 1e-12,
) -> tuple[Any, Any]:
    """Losses and what is in the model after three steps; gives both optimizers."""
    eager = copy.deepcopy(model)
    mine, theirs = make(model), make(eager)

    def train(one: torch.nn.Module, optimizer: Any) -> float:
        both = as_one(optimizer)
        both.zero_grad()
        loss = loss_fn(one, *batch)
        loss.backward()
        both.step()
        return float(loss.detach())

    for _ in range(steps_before):
        train(model, mine)
        train(eager, theirs)
    got = losses(model, batch, loss_fn, mine)
    want = [train(eager, theirs) for _ in range(3)]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for name, value in eager.state_dict().items():
        other = model.state_dict()[name]
        torch.testing.assert_close(other, value, rtol=tolerance, atol=tolerance)
    return each_of(as_one(mine)), each_of(as_one(theirs))
