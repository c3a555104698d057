"""What the user threads share: chains written by hand, captured models, who is where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from devplace.cost import Analytic
from devplace.graph import OpGraph
from devplace.machine import Machine
from devplace.placers import Result
from devplace.problem import Problem
from devplace.step_capture import capture


def chain(sizes: Sequence[int], ns: str = "100", activation: int = 1) -> str:
    """Text of a chain of layers with one parameter each, that is updated in place."""
    lines = [f"x = input bytes={activation}"]
    for k, size in enumerate(sizes):
        read = f"y{k - 1}" if k else "x"
        lines += [f"w{k} = parameter bytes={size} module=l.{k}"]
        lines += [f"y{k} = f({read}, w{k}) bytes={activation} ns={ns} module=l.{k}"]
        lines += [f"u{k} = sgd_(w{k}, y{k}) bytes=0 ns=0 replaces=w{k} module=l.{k}"]
    return "\n".join(lines)


def where(result: Result) -> dict[str, str]:
    """Device name of every op by name."""
    problem = result.timeline.problem
    names = problem.machine.device_names
    pairs = zip(problem.graph.ops, result.placement.devices, strict=True)
    return {op.name: names[device] for op, device in pairs}


def layers_on(result: Result, device: str) -> list[int]:
    """Layers of a `chain` whose op is on this device."""
    return [int(k[1:]) for k, d in where(result).items() if k[0] == "y" and d == device]


def captured(
    model: nn.Module, inputs: Any, machine: Machine, optimizer: Any = None, **demands: Any
) -> Problem:
    """A real model as a problem: a training step with an optimizer, else inference."""
    loss = None if optimizer is None else (lambda model, *args: model(*args).square().mean())
    graph = capture(model, inputs, loss, optimizer)
    return priced(graph, machine, **demands)


def priced(graph: OpGraph, machine: Machine, **demands: Any) -> Problem:
    """A captured graph with roofline costs."""
    return Problem(graph, machine, Analytic()(graph, machine), **demands)


def mlp(width: int, depth: int) -> nn.Sequential:
    """A stack of linear layers with ReLU between."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Plain SGD over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)
