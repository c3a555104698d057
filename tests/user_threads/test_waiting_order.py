"""Theme U: plans whose devices wait while an op is ready."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import devplace as dp
from devplace.cost import CostTable
from devplace.placers import Heft, Result, place
from devplace.problem import Placement
from devplace.run.check import check_step
from devplace.simulator import simulate
from devplace.testing import hand_machine
from devplace.verify import verify_placement, verify_plan


class Branches(torch.nn.Module):
    """Three ways through, of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(length)))
            for length in (1, 2, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for way in self.ways:
            total = total + way(x).relu()
        return total


def waiting_plan(graph: dp.OpGraph) -> Result:
    """HEFT's plan under made-up times, the first that keeps to an order of its own."""
    machine = hand_machine({"cpu:0": 10**9, "cpu:1": 10**9}, latency_ns=10**5)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        times = rng.integers(1, 10**6, (len(graph.ops), 1)) * np.ones(2, np.int64)
        problem = dp.Problem(graph, machine, CostTable(times.astype(np.int64), "hand"))
        result = place(problem, Heft(), "6ev")
        if result.placement.order is not None:
            return result
    raise AssertionError("no seed of 100 has devices wait")


def test_s62_a_plan_whose_devices_wait_is_verified_and_runs(tmp_path: Path) -> None:
    """HEFT's own order is in the plan file, another replay gives the same step, and running it on
    logical CPU devices gives what the unplaced step gives."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph = dp.capture(model, (x, y), F.mse_loss, optimizer)
    result = waiting_plan(graph)
    problem, plan = result.timeline.problem, result.plan
    by_priority = Placement(result.placement.devices, result.placement.priority)
    assert result.step_ns < simulate(problem, by_priority).makespan_ns
    assert plan.order == result.placement.order
    for verdict in (verify_plan(problem, plan), verify_placement(problem, result.placement)):
        assert verdict.step_ns == result.step_ns
        assert not verdict.broken
    plan.save(tmp_path / "plan.json")
    plan = dp.load_plan(tmp_path / "plan.json")
    placed = (plan.placement, plan.order, plan.device_names)
    assert plan.order == result.placement.order
    assert check_step(graph, model, optimizer, (x, y), *placed).is_bit_equal
