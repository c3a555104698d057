"""The breakdown of a device's memory at its peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
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
    """When the first of two updates runs: both weights and one new, both gradients, loss, input."""
    (row,) = memory_rows(placed(make_problem(chain_graph(2), machine(1))).timeline)
    assert row.peak_ns == 6 * OP_NS
    assert {name: size for name, size in row.parts.items() if size} == {
        "parameters": 3000,
        "gradients": 2000,
        "activations": 4,
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
        "parameters_bytes": 3000,
        "optimizer_state_bytes": 0,
        "gradients_bytes": 2000,
        "activations_bytes": 4,
        "temporaries_bytes": 0,
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
