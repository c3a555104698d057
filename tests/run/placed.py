"""Helpers: train a placed step and the eager model side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from devplace.graph import OpGraph
from devplace.run.compile import Step, compile_step
from devplace.step_capture import capture
from tests.run.tracing import place_by_module, random_placement

NAMES = ("cpu:0", "cpu:1", "cpu:2")
Place = Callable[[OpGraph], tuple[list[int], list[list[int]]]]
MakeOptimizer = Callable[[Sequence[Any]], Any]


def sgd(parameters: Sequence[Any]) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Sequence[Any]) -> Any:
    return torch.optim.Adam(parameters, lr=0.01)


def at_random(seed: int) -> Place:
    """Every op on a random device of three, in a random order."""
    return lambda graph: random_placement(graph, 3, seed)


def by_module(device_of: Callable[[str], int]) -> Place:
    """Every op where its module path says."""
    return lambda graph: place_by_module(graph, lambda op: device_of(op.module), 3)


def all_on(device: int) -> Place:
    """Every op on one device."""
    return by_module(lambda module: device)


def make_step(
    model: Any, batch: tuple[Any, ...], loss: Any, optimizer: Any, place: Place, **options: Any
) -> Step:
    graph = capture(model, batch, loss, optimizer)
    return compile_step(model, optimizer, graph, *place(graph), NAMES, **options)


def train_eager(model: Any, optimizer: Any, batches: Sequence[Any], loss_fn: Any) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def largest_difference(first: Any, second: Any) -> float:
    """Over all entries of two state dicts."""
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel())


def compare_with_eager(
    model: Any,
    batches: Sequence[tuple[Any, ...]],
    loss_fn: Any,
    make_optimizer: MakeOptimizer,
    place: Place,
    tolerance: float = 1e-9,
) -> Step:
    """Train both and assert equal losses, parameters, buffers; gives the step."""
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(list(model.parameters()))
    step = make_step(model, batches[0], loss_fn, optimizer, place)
    losses = [float(step(*batch)) for batch in batches]
    step.sync()
    expected = train_eager(twin, make_optimizer(list(twin.parameters())), batches, loss_fn)
    assert all(abs(a - b) <= tolerance for a, b in zip(losses, expected, strict=True))
    assert largest_difference(model, twin) <= tolerance
    return step
