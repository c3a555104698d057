"""Graphs, machines and timelines written by hand."""

from __future__ import annotations

import pytest

from devplace.errors import InputError
from devplace.simulator import simulate
from devplace.testing import hand_graph, hand_machine, hand_placement, hand_problem, show


def test_a_line_gives_op_tensors_and_results() -> None:
    """Sources, several outputs, views, replaced parameters and results are read as written."""
    graph = hand_graph(
        """
        w = parameter bytes=8 module=fc  # a comment
        a = split(w) bytes=4,4 flops=3 workspace_bytes=2 stage=backward
        v = view(a:1) bytes=4
        u = sgd(w, v) bytes=8 replaces=w
        l = sum(a:0) bytes=1 result=loss
        """
    )
    w, a, v, _, _ = graph.ops
    assert (w.role, w.stage, w.module) == ("parameter", "source", "fc")
    assert (a.outputs, a.flops, a.workspace_bytes, a.stage) == ((1, 2), 3, 2, "backward")
    assert v.alias_of == 2
    assert graph.replaced == {0: 4}
    assert [(r.name, r.role) for r in graph.results] == [("w", "parameter"), ("loss", "loss")]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("nonsense", "name = kind"),
        ("a = f(b)", "'b'"),
        ("a = f result=prize", "'prize'"),
        ("a = f replaces=b", "'b'"),
    ],
)
def test_a_bad_line_is_named(line: str, part: str) -> None:
    """What cannot be read is an InputError that names the culprit."""
    with pytest.raises(InputError, match=part):
        hand_graph(line)


def test_a_wrong_number_of_times_is_refused() -> None:
    """Times are one for all devices or one for each."""
    with pytest.raises(InputError, match="needs 1 or 3 times, got 2"):
        hand_problem("a = f ns=1,2", hand_machine({"gpu:0": 1, "gpu:1": 1, "gpu:2": 1}))


def test_show_lists_ops_per_device_and_transfers() -> None:
    """The text of a timeline has every op with its times, and every transfer."""
    problem = hand_problem(
        "a = f bytes=6 ns=5\nb = g(a) ns=4", hand_machine({"gpu:0": 9, "cpu:0": 9}, latency_ns=1)
    )
    timeline = simulate(problem, hand_placement(problem, {"b": "cpu:0"}))
    assert show(timeline) == "gpu:0: a@0-5\ncpu:0: b@12-16\ngpu:0->cpu:0: a@5-12"
