"""Layers over devices, and micro-batches side by side."""

from __future__ import annotations

import numpy as np
import torch

from devplace.cost import Analytic
from devplace.graph import OpGraph
from devplace.machine import presets
from devplace.placers import Budget, DataParallel, Layers, place
from devplace.problem import Problem
from devplace.step_capture import capture


class Stacked(torch.nn.Module):
    """An embedding, four layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.head = torch.nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def step_of(micro_batches: int = 1) -> OpGraph:
    model = Stacked()
    tokens = torch.zeros(8, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(
        model, (tokens, tokens), torch.nn.functional.cross_entropy, optimizer, micro_batches
    )


def problem_of(graph: OpGraph, machine: str) -> Problem:
    found = presets.get(machine)
    return Problem(graph, found, Analytic()(graph, found))


def devices_of_modules(problem: Problem, placement: tuple[int, ...]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    names = problem.machine.device_names
    for op, device in zip(problem.graph.ops, placement, strict=True):
        if not op.is_source and not op.is_view and op.module:
            found.setdefault(op.module, set()).add(names[device])
    return found


def test_layers_go_over_the_devices_in_turn() -> None:
    """Two layers each on two cards; what comes before sits with the first, the head with the
    last."""
    problem = problem_of(step_of(), "k40x2")
    result = place(problem, Layers(), Budget(evaluations=1))
    found = devices_of_modules(problem, result.plan.placement)
    assert found == {
        "embedding": {"cuda:0"},
        "layers.0": {"cuda:0"},
        "layers.1": {"cuda:0"},
        "layers.2": {"cuda:1"},
        "layers.3": {"cuda:1"},
        "head": {"cuda:1"},
    }


def test_more_devices_than_layers_are_left_idle() -> None:
    """Four layers on eight cards use every second one."""
    problem = problem_of(step_of(), "k40x8")
    result = place(problem, Layers(), Budget(evaluations=1))
    found = devices_of_modules(problem, result.plan.placement)
    assert [found[f"layers.{k}"] for k in range(4)] == [{f"cuda:{d}"} for d in (0, 2, 4, 6)]


def test_a_model_without_a_stack_is_refused() -> None:
    """The reason is told."""
    model = torch.nn.Linear(3, 3)
    graph = capture(model, (torch.zeros(2, 3),))
    assert "no stack" in Layers().supports(problem_of(graph, "k40x2"))


def test_micro_batches_sit_side_by_side() -> None:
    """Every op of a micro-batch that owns no parameter is on that micro-batch's card."""
    problem = problem_of(step_of(micro_batches=4), "k40x4")
    result = place(problem, DataParallel(), Budget(evaluations=1))
    names = problem.machine.device_names
    for op, device in zip(problem.graph.ops, result.plan.placement, strict=True):
        if op.stage == "forward" and op.micro_batch >= 0 and not op.is_view:
            assert names[device] == f"cuda:{op.micro_batch}"


def test_parameters_are_spread_by_size() -> None:
    """No card holds more than the largest parameter above the mean."""
    problem = problem_of(step_of(micro_batches=2), "k40x2")
    result = place(problem, DataParallel(), Budget(evaluations=1))
    held = np.zeros(len(problem.machine.devices))
    sizes = []
    for op, device in zip(problem.graph.ops, result.plan.placement, strict=True):
        if op.role == "parameter":
            size = sum(problem.graph.tensors[t].num_bytes for t in op.outputs)
            held[device] += size
            sizes.append(size)
    used = held[held > 0]
    assert len(used) == 2
    assert used.max() - used.min() <= max(sizes)


def test_one_micro_batch_is_refused() -> None:
    """The reason names what to do."""
    assert "micro_batches=2" in DataParallel().supports(problem_of(step_of(), "k40x2"))
