"""Reports of a step that was really run."""

from __future__ import annotations

import numpy as np
import torch
from tests.report.test_chrome_trace import rows_of
from tests.strategies import random_placement

from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.placers.simple.single import all_on
from devplace.problem import Problem
from devplace.report import chrome_trace, measured_summary, memory_rows, not_observed
from devplace.run.compile import compile_step
from devplace.simulator import simulate
from devplace.step_capture import capture


def test_s71_every_planned_op_is_observed_on_its_device() -> None:
    """After a run on two logical CPUs both processes of the trace hold the same ops per device."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(3, 4),)
    graph = capture(model, batch, lambda model, x: model(x).square().mean(), optimizer)
    machine = load_machine("cpux2")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    timeline = simulate(problem, random_placement(problem, np.random.default_rng(1)))
    assert timeline.transfers
    step = compile_step(
        model, optimizer, graph, timeline.devices.tolist(), timeline.order, machine.device_names
    )
    step.is_timed = True
    step(*batch)
    measured = step.timeline
    transfers = step.executor.schedule.transfers
    step.close()
    assert measured is not None
    assert not_observed(timeline, measured) == []
    assert "predicted" in measured_summary(timeline, measured)
    trace = chrome_trace(timeline, measured, transfers)
    planned, seen = rows_of(trace, "planned"), rows_of(trace, "measured")
    for name in machine.device_names:
        ran = [e["name"] for row, slices in seen.items() if row.startswith(name) for e in slices]
        assert sorted(ran) == sorted(e["name"] for e in planned[name])
    assert sum(len(seen[row]) for row in seen if row.startswith("link")) == len(transfers)


def test_s11_breakdown_of_a_captured_adam_step() -> None:
    """Parameters, two states each, gradients of their size, and a batch are found as such."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    batch = (torch.randn(8, 64),)
    graph = capture(model, batch, lambda model, x: model(x).square().mean(), optimizer)
    machine = load_machine("cpux2")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    timeline = simulate(problem, all_on(problem, 0))
    row, unused = memory_rows(timeline)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights <= row.parts["parameters"] <= 2 * weights
    assert 2 * weights <= row.parts["optimizer state"] <= 4 * weights + 100
    assert 0 < row.parts["gradients"] <= weights
    assert row.parts["inputs"] >= batch[0].nbytes
    assert unused.peak_bytes == 0
