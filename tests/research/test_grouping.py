"""Groups that policies place, and what they see of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplace.problem import Problem
from devplace.research import features
from devplace.research.grouping import (
    Grouping,
    colocated,
    colocation,
    joined,
    task_edges,
)
from devplace.testing import hand_machine, hand_problem
from tests.research.cases import three_ops
from tests.strategies import random_problem


def unrolled() -> Problem:
    """Two LSTM cells over three steps with a backward pass, tagged as capture does."""
    lines = ["x = input bytes=4", "w0 = parameter bytes=8", "w1 = parameter bytes=8"]
    last = "x"
    for step in range(3):
        for cell in range(2):
            tag = f"module=cells.{cell} call={step}"
            lines += [
                f"m{step}{cell} = mm({last}, w{cell}) bytes=8 ns=9 {tag}",
                f"t{step}{cell} = tanh(m{step}{cell}) bytes=4 ns=3 {tag}",
            ]
            last = f"t{step}{cell}"
    for cell in range(2):
        lines.append(f"g{cell} = mm_back({last}) bytes=8 ns=9 stage=backward module=cells.{cell}")
        lines.append(f"u{cell} = sgd(w{cell}, g{cell}) bytes=8 ns=1 stage=update replaces=w{cell}")
    return hand_problem("\n".join(lines), hand_machine({"gpu:0": 999, "gpu:1": 999}))


def groups_by_name(grouping: Grouping) -> dict[str, int]:
    """Group of each op that is a task."""
    problem = grouping.problem
    tasks = problem.core.tasks
    names = [problem.graph.ops[op].name for op in tasks.task_op]
    return dict(zip(names, grouping.of_task.tolist(), strict=True))


def test_colocation_joins_an_op_with_its_only_reader() -> None:
    """m feeds only t, so they share a group; steps of different cells do not."""
    found = groups_by_name(colocated(unrolled(), 9))
    assert found["m00"] == found["t00"]
    assert found["m21"] == found["t21"]
    assert found["w0"] == found["u0"]


def test_groups_are_capped() -> None:
    """Never more than asked for, down to one; every group has members."""
    problem = unrolled()
    for most in (8, 5, 3, 2, 1):
        grouping = colocated(problem, most)
        assert 1 <= grouping.num_groups <= most
        assert set(grouping.of_colocation.tolist()) == set(range(grouping.num_groups))


def test_joining_keeps_together_what_exchanges_most() -> None:
    """Four equal ops in two heavily and one lightly joined pair: the heavy pairs become groups."""
    problem = hand_problem(
        """
        a = f ns=10 bytes=90
        b = f(a) ns=10 bytes=1
        c = f(b) ns=10 bytes=90
        d = f(c) ns=10 bytes=1
        """,
        hand_machine({"gpu:0": 999, "gpu:1": 999}),
    )
    assert joined(problem, np.arange(4), 2).of_colocation.tolist() == [0, 0, 1, 1]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.integers(1, 12))
def test_any_problem_is_grouped(seed: int, most: int) -> None:
    """Numbered by first task, within the cap, the same each time; expanded placements are legal."""
    problem = random_problem(seed, 25, 3)
    rng = np.random.default_rng(seed)
    for grouping in (colocation(problem), colocated(problem, most)):
        firsts = [int((grouping.of_task == g).argmax()) for g in range(grouping.num_groups)]
        assert firsts == sorted(firsts)
        devices = rng.integers(0, 3, (2, grouping.num_groups)).astype(np.int32)
        expanded = grouping.colocation_devices(devices)
        assert expanded.shape == (2, problem.core.tasks.num_groups)
        assert problem.allowed[np.arange(expanded.shape[1]), expanded[0]].all()
    assert colocated(problem, most).num_groups <= most
    again = colocated(problem, most).of_colocation
    assert again.tolist() == colocated(problem, most).of_colocation.tolist()


def test_features_of_ops_by_hand() -> None:
    """Types, shapes and neighbours of a small graph."""
    problem = three_ops()
    index, names = features.op_types(problem)
    assert names == ("f", "g", "join")
    assert index.tolist() == [0, 1, 2]
    assert features.one_hot(index, 3).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    shapes = features.output_shapes(problem)
    assert shapes.shape == (3, 25)
    assert shapes[0, :2].tolist() == [1, -1]
    assert features.num_outputs(problem).tolist() == [1, 1, 1]
    assert task_edges(problem).tolist() == [[0, 1], [2, 2]]
    table = features.neighbour_table(problem, 2)
    assert table.tolist() == [[2, 1, -1, 0], [2, 1, -1, 0], [0, -1, 1, -1]]


def test_every_incoming_neighbour_is_kept() -> None:
    """Five makers of one op are all in its table (HDP's released code kept the last only)."""
    lines = [f"a{k} = f ns=1" for k in range(5)] + ["z = join(a0, a1, a2, a3, a4) ns=1"]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 99}))
    row = features.neighbour_table(problem, 10)[5].reshape(10, 2)
    assert row[:5].tolist() == [[k, -1] for k in range(5)]
    assert row[5:].tolist() == [[-1, 0]] * 5


def test_features_of_groups_by_hand() -> None:
    """Type counts, summed shapes, and edges both ways; each block scaled by itself."""
    grouping = Grouping(three_ops(), np.array([0, 0, 1], np.int32))
    edges, num_bytes = features.group_edges(grouping)
    assert edges.tolist() == [[0], [1]]
    assert num_bytes.tolist() == [2]
    assert features.group_adjacency(grouping).tolist() == [[0, 1], [0, 0]]
    rows = features.group_features(grouping)
    assert rows.shape == (2, 3 + 25 + 2 * 2)
    assert rows[0, :3].tolist() == [0.5, 0.5, 0]
    assert rows[0, 3] == pytest.approx(2 / 3)
    assert rows[1, 28:].tolist() == [0, 0, 0.5, 0]
    assert features.group_costs(grouping).tolist() == [[45, 50], [5, 50]]
    assert features.topological_positions(grouping).tolist() == [0.25, 1.0]


def test_features_of_devices_by_hand() -> None:
    """Relative time of the step, memory, kind and bandwidth of each usable device."""
    problem = hand_problem(
        "a = f ns=10,40,20 bytes=1",
        hand_machine({"gpu:0": 1000, "cpu:0": 100, "gpu:1": 10}),
        exclude=["gpu:1"],
    )
    rows = features.device_features(problem)
    assert rows.tolist() == [
        pytest.approx([0.25, 3, 0, 9]),
        pytest.approx([1, 2, 1, 9]),
    ]


def test_kept_bytes_of_groups() -> None:
    """Parameters with their state and results count once, with the group that keeps them."""
    grouping = colocation(unrolled())
    assert features.group_bytes(grouping).sum() >= 16
