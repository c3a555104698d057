"""The breakdown of a device's memory at its peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.steps import (
    ACTIVATION,
    OP_NS,
    chain_graph,
    machine,
    make_problem,
    placed,
    rendered,
)
from tests.strategies import problems, random_placement

from devplace.problem import Problem
from devplace.report import memory_json, memory_rows, memory_table
from devplace.simulator import simulate


@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_parts_add_up_to_the_simulated_peak(problem: Problem, seed: int) -> None:
    """On random problems the parts are not negative and sum to each device's peak exactly."""
    timeline = simulate(problem, random_placement(problem, np.random.default_rng(seed)))
    rows = memory_rows(timeline)
    assert [row.peak_bytes for row in rows] == timeline.peak_bytes.tolist()
    assert all(size >= 0 for row in rows for size in row.parts.values())


def test_s11_breakdown_of_a_chain_by_hand() -> None:
    """When the first of two updates runs: both weights, both gradients, loss, input, and a new
    weight, which is temporary as long as the old one is there."""
    (row,) = memory_rows(placed(make_problem(chain_graph(2), machine(1))).timeline)
    assert row.peak_ns == 6 * OP_NS
    assert {name: size for name, size in row.parts.items() if size} == {
        "parameters": 2000,
        "gradients": 2000,
        "activations": 4,
        "temporaries": 1000,
        "inputs": ACTIVATION,
    }


def test_kept_activations_and_receive_buffers_are_told_apart() -> None:
    """A forward value that backward reads counts as activation, its copy elsewhere as receive."""
    problem = make_problem(chain_graph(2), machine(2))
    timeline = placed(problem, {"layer0": "cuda:0"}, "cuda:1").timeline
    sender, receiver = memory_rows(timeline)
    assert sender.parts["receive buffers"] == ACTIVATION  # the gradient that comes back
    assert receiver.parts["receive buffers"] == ACTIVATION
    assert receiver.parts["activations"] == 4
    rows = timeline.memory[timeline.memory[:, 1] == 1]
    assert rows[0].tolist() == [0, 1, 1000 + ACTIVATION]


def test_s11_json_says_what_lacks() -> None:
    """The JSON form has integers for every category, the limit, and a yes or no."""
    problem = make_problem(chain_graph(2), machine(1, memory=5000))
    found = memory_json(placed(problem).timeline)
    assert found["fits"] is False
    assert found["missing_bytes"] == {"cuda:0": 104}
    assert found["devices"]["cuda:0"] == {
        "parameters_bytes": 2000,
        "optimizer_state_bytes": 0,
        "gradients_bytes": 2000,
        "activations_bytes": 4,
        "temporaries_bytes": 1000,
        "inputs_bytes": 100,
        "receive_buffers_bytes": 0,
        "work_buffers_bytes": 0,
        "gaps_bytes": 0,
        "peak_bytes": 5104,
        "limit_bytes": 5000,
        "peak_ns": 6 * OP_NS,
    }


def test_memory_table_is_readable_at_80_columns() -> None:
    """Every figure is shown in full, and what lacks is named."""
    problem = make_problem(chain_graph(2), machine(8, memory=5000, with_cpu=True))
    text = rendered(memory_table(placed(problem).timeline), 80)
    assert "lacks 104 B" in text
    assert "…" not in text


def test_gaps_are_a_part_of_their_own() -> None:
    """What torch reserves beyond what is in use is shown where the costs say that it does."""
    problem = make_problem(chain_graph(2), machine(1))
    problem = replace(problem, costs=replace(problem.costs, has_gaps=True))
    timeline = placed(problem).timeline
    (row,) = memory_rows(timeline)
    assert row.parts["gaps"] == timeline.gap_bytes[0] > 0
    assert (
        row.peak_bytes == timeline.peak_bytes[0] == timeline.run.peak_bytes[0] + row.parts["gaps"]
    )
    assert row.peak_ns == 6 * OP_NS
    assert "gaps" in rendered(memory_table(timeline), 100)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["p100x2", "cpux2"])
@pytest.mark.parametrize("placer", ["single", "even"])
def test_columns_add_up_to_what_model_and_optimizer_have(where: str, placer: str) -> None:
    """Whatever a peak finds of the update: old values, Adam's decayed averages, or new ones."""
    import torch

    import devplace as dp
    from devplace import workloads

    workload = workloads.build("bert-base", size="small", device="meta")
    update = torch.optim.Adam(workload.model.parameters())
    graph = dp.capture(workload.model, workload.inputs, workload.loss_fn, update)
    described = dp.load_machine(where)
    problem = dp.Problem(graph, described, dp.Analytic()(graph, described))
    rows = memory_rows(dp.place(problem, dp.placers.by_name(placer), "20ev").timeline)
    size = sum(p.numel() * 4 for p in workload.model.parameters())
    assert sum(row.parts["parameters"] for row in rows) == size
    assert sum(row.parts["optimizer state"] for row in rows) == 2 * size
