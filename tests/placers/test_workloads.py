"""Published heuristics and partitioners on every workload."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from devplace import workloads
from devplace.cost import Analytic
from devplace.graph import OpGraph
from devplace.machine import presets
from devplace.placers import Budget, by_name, place
from devplace.problem import Problem
from devplace.simulator.bounds import lower_bound
from devplace.step_capture import capture

NAMES = (
    "expert",
    "m-topo",
    "m-etf",
    "m-sct",
    "mayer",
    "pipedream",
    "scotch",
    "scotch-repaired",
    "mincut",
    "mincut-repaired",
)


@cache
def graph_of(name: str) -> OpGraph:
    workload = workloads.build(name, size="small")
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=0.1)
    return capture(workload.model, workload.inputs, workload.loss_fn, optimizer, name=name)


@pytest.mark.parametrize("machine_name", ["k40x4", "unequal-2"])
@pytest.mark.parametrize("workload", workloads.NAMES)
@pytest.mark.slow
def test_every_workload_gets_a_plan_from_every_placer(workload: str, machine_name: str) -> None:
    """Legal, within memory (small models fit anywhere), and the same for another seed."""
    graph, machine = graph_of(workload), presets.get(machine_name)
    problem = Problem(graph, machine, Analytic()(graph, machine))
    bound = lower_bound(problem)
    for name in NAMES:
        placer = by_name(name)
        if placer.supports(problem):
            continue
        budget = Budget(evaluations=30)
        result = place(problem, placer, budget, 0, bound=bound)
        assert result.is_feasible, name
        assert result.step_ns >= bound.step_ns, name
        again = place(problem, placer, budget, 1, bound=bound)
        assert np.array_equal(result.placement.devices, again.placement.devices), name


@pytest.mark.parametrize("name", ["scotch", "mincut"])
@pytest.mark.parametrize("workload", ["nmt-2", "bert-base", "resnet-50", "moe"])
def test_repair_fits_where_the_blind_partition_does_not(workload: str, name: str) -> None:
    """The blind partition's fullest card gets a limit a sixth below what it needs, so that not all
    is lost; repaired, the plan is within every limit."""
    graph, machine = graph_of(workload), presets.get("k40x4")
    costs = Analytic()(graph, machine)
    problem = Problem(graph, machine, costs)
    placer = by_name(name)
    if reason := placer.supports(problem):
        pytest.skip(reason)
    peaks = place(problem, placer, Budget(evaluations=1)).timeline.peak_bytes
    fullest = int(peaks.argmax())
    limits = {machine.device_names[fullest]: int(peaks[fullest] * 5 // 6)}
    tight = Problem(graph, machine, costs, limits=limits)
    blind = place(tight, placer, Budget(evaluations=1), allow_infeasible=True)
    assert not blind.is_feasible
    fixed = place(tight, by_name(f"{name}-repaired"), Budget(evaluations=90))
    assert fixed.is_feasible
