"""Runs a captured step and compares it with eager torch.optim; used by the capture tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from devplace.graph import OpGraph
from devplace.step_capture import capture, flatten_batch


class Runner:
    """Runs a captured program step by step on copies of the model's tensors."""

    def __init__(self, graph: OpGraph, model: torch.nn.Module) -> None:
        self.graph = graph
        self.program = graph.program
        named = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        self.values: dict[int, torch.Tensor] = {}
        for binding in self.program.bindings:
            if binding.kind in ("parameter", "buffer"):
                self.values[binding.op] = named[binding.key].detach().clone()
            elif binding.kind == "state":
                self.values[binding.op] = torch.zeros_like(named[binding.key].detach())
            elif binding.kind == "constant":
                self.values[binding.op] = binding.value

    def step(
        self, number: int, inputs: Any, kwargs: Any = None, param_groups: Any = None
    ) -> list[torch.Tensor]:
        leaves, spec = flatten_batch(inputs, kwargs)
        assert spec == self.program.input_spec
        scalars = self.program.scalars(number, param_groups)
        flat = []
        for binding in self.program.bindings:
            if binding.kind == "input":
                flat.append(leaves[binding.slot])
            elif binding.kind == "scalar":
                value = scalars[binding.key]
                flat.append(torch.tensor(value, dtype=torch.float64, device=self.program.device))
            else:
                flat.append(self.values[binding.op])
        with torch.no_grad():
            outputs = self.program.module(*flat)
        for result, value in zip(self.graph.results, outputs, strict=True):
            if result.replaces >= 0:
                self.values[result.replaces] = value
        return list(outputs)

    def named(self, role: str) -> dict[str, torch.Tensor]:
        found = {b.key: self.values[b.op] for b in self.program.bindings if b.kind == role}
        shared = self.program.buffers_shared
        return found | {name: found[first] for name, first in shared.items() if first in found}


def assert_same_training(
    model: torch.nn.Module,
    batches: Sequence[Any],
    loss_fn: Callable[..., Any] | None,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    *,
    eager_loss: Callable[..., Any] | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    after_backward: Callable[[torch.nn.Module], Any] | None = None,
    tolerance: float = 1e-12,
    **options: Any,
) -> OpGraph:
    """Train eagerly and by the captured step; loss, parameters and buffers must agree."""
    eager = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    graph = capture(model, batches[0], loss_fn, optimizer, **options)
    runner = Runner(graph, model)
    eager_optimizer = make_optimizer(eager)
    scheduler = schedule(eager_optimizer) if schedule else None
    for number, batch in enumerate(batches, 1):
        torch.manual_seed(number)
        got = runner.step(number, batch, param_groups=eager_optimizer.param_groups)[0]
        eager_optimizer.zero_grad()
        torch.manual_seed(number)
        args = batch if isinstance(batch, tuple) else (batch,)
        kwargs = batch if isinstance(batch, dict) else {}
        args = () if isinstance(batch, dict) else args
        loss = (eager_loss or loss_fn)(eager, *args, **kwargs)
        loss.backward()
        if after_backward:
            after_backward(eager)
        eager_optimizer.step()
        if scheduler:
            scheduler.step()
        torch.testing.assert_close(got, loss.detach(), rtol=tolerance, atol=tolerance)
        _assert_equal(runner.named("parameter"), dict(eager.named_parameters()), tolerance)
        _assert_equal(runner.named("buffer"), dict(eager.named_buffers()), tolerance)
    return graph


def _assert_equal(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert got.keys() >= want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name],
            value.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def small_net() -> torch.nn.Sequential:
    """Linear, batch norm, in-place ReLU, linear; float64."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(inplace=True),
        torch.nn.Linear(16, 4),
    )
    return net.double()


def batches(count: int = 3, rows: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of 8 features with one of 4 classes."""
    torch.manual_seed(1)
    return [(torch.randn(rows, 8).double(), torch.randint(0, 4, (rows,))) for _ in range(count)]


def xent(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the model's output."""
    return torch.nn.functional.cross_entropy(model(x), y)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
