"""Every workload, captured, planned on three logical CPU devices, and run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devplace import placers, workloads
from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.problem import Problem
from devplace.run import check
from devplace.step_capture import capture

OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", workloads.NAMES)
@pytest.mark.slow
def test_placed_steps_equal_the_unplaced_ones(name: str, optimizer_name: str) -> None:
    """A random and a searched placement give the same loss, parameters, buffers and state in three
    steps: bit for bit, or within 1e-6 in float64."""
    workload = workloads.build(name, size="small", device="cpu")
    model = workload.model.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in workload.inputs)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), lr=1e-3)
    graph = capture(model, inputs, workload.loss_fn, optimizer, name=name)
    machine = load_machine("cpux3")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    for placer in (placers.Random(), placers.Search()):
        result = placers.place(problem, placer, "40ev")
        report = check(graph, result.plan, inputs, steps=3)
        assert report.steps == 3
        assert report.is_bit_equal or report.worst.error < 1e-6
    assert len(graph.results) > len(list(model.parameters()))
