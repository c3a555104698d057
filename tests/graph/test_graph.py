"""What a graph refuses, and what it derives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from devplace.errors import GraphError
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.testing import hand_graph


def tensor(name: str, num_bytes: int = 4) -> Tensor:
    """A tensor of some bytes."""
    return Tensor(name, (num_bytes,), "uint8", num_bytes)


def two(**changes: Any) -> OpGraph:
    """A source and an op that reads it, with changes."""
    parts: dict[str, Any] = {
        "name": "two",
        "ops": (
            Op("x", "source", outputs=(0,), stage="source", role="parameter"),
            Op("a", "f", inputs=(0,), outputs=(1,)),
        ),
        "tensors": (tensor("x"), tensor("a")),
    }
    return OpGraph(**(parts | changes))


X = Op("x", "source", outputs=(0,), stage="source", role="parameter")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ops": ()}, "has no ops"),
        ({"ops": (Op("p", "f", inputs=(1,), outputs=(0,)), Op("q", "f", (0,), (1,)))},
         "topological order without cycles: 'p' reads 'a' before"),
        ({"ops": (Op("x", "f", inputs=(0,), outputs=(0,)), Op("a", "f", outputs=(1,)))},
         "'x' reads 'x' before it is made"),
        ({"ops": (X, Op("x", "f", inputs=(0,), outputs=(1,)))}, "'x' occurs twice"),
        ({"ops": (X, Op("a", "f", inputs=(0,), outputs=(0,)))}, "makes tensor 0 twice"),
        ({"ops": (X, Op("a", "f", outputs=(1, 1)))}, "makes tensor 1 twice"),
        ({"ops": (X, Op("a", "f", inputs=(7,), outputs=(1,)))}, "reads tensor 7"),
        ({"ops": (X, Op("a", "f", inputs=(-1,), outputs=(1,)))}, "reads tensor -1"),
        ({"ops": (X, Op("a", "f", outputs=(9,)))}, "makes tensor 9"),
        ({"ops": (X, Op("a", "f"))}, "Tensor 'a' is made by no op"),
        ({"ops": (X, Op("a", "f", outputs=(1,), alias_of=0))}, "View 'a' must read"),
        ({"ops": (X, Op("a", "f", outputs=(1,), flops=-1))}, "'a' has"),
        ({"ops": (X, Op("a", "f", outputs=(1,), workspace_bytes=2**63))}, "'a' has"),
        ({"ops": (X, Op("a", "source", (0,), (1,), 0, stage="source", role="parameter"))},
         "'a' must read nothing"),
        ({"tensors": (tensor("x"), Tensor("a", (-3,), "uint8", 3))}, r"'a' is \(-3,\)"),
        ({"tensors": (tensor("x"), tensor("a", -4))}, "'a' has -4 bytes"),
        ({"tensors": (tensor("x"), tensor("a", 2**63))}, "'a' has 9223372036854775808 bytes"),
        ({"tensors": (tensor("x"), tensor("x"))}, "Tensor names must be unique: 'x'"),
        ({"results": (StepResult("l", 9, "loss"),)}, "'l' names tensor 9"),
        ({"results": (StepResult("l", -1, "loss"),)}, "'l' names tensor -1"),
        ({"results": (StepResult("x", 1, "parameter", 1),)}, "not a source"),
        ({"results": (StepResult("x", 1, "parameter", 5),)}, "not a source"),
        ({"results": (StepResult("x", 1, "parameter", 0), StepResult("y", 1, "parameter", 0))},
         "Two results replace 'x'"),
    ],
)  # fmt: skip
def test_malformed_graphs_are_refused(changes: dict[str, Any], part: str) -> None:
    """Cycles, duplicates, dangling tensors and bad sizes are GraphErrors that name the culprit."""
    with pytest.raises(GraphError, match=part):
        two(**changes)


def test_a_graph_derives_producers_and_replacements() -> None:
    """Who makes each tensor, which source gets which new value, and the number of edges."""
    graph = hand_graph("w = parameter\na = f(w, w) bytes=1,2\nw2 = g(a:1, w) replaces=w")
    assert graph.producer == (0, 1, 1, 2)
    assert graph.replaced == {0: 3}
    assert graph.op_index == {"w": 0, "a": 1, "w2": 2}
    assert graph.num_edges == 4


def test_planning_needs_no_torch() -> None:
    """Graphs, problems, placers and plans are imported without importing torch."""
    code = (
        "import sys, devplace, devplace.graph, devplace.placers, devplace.plan, devplace.testing;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
