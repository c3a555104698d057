"""Graphs that look like training steps."""

from __future__ import annotations

import pytest

from devplace.graph.coarsen import coarsen
from devplace.placers import Search, place
from devplace.testing.layered import layered_problem


@pytest.mark.parametrize("num_ops", [10, 400, 3000])
def test_layered_graphs_have_about_as_many_ops_as_asked_for(num_ops: int) -> None:
    """Within 10 %, with a main and a side path for every layer."""
    problem = layered_problem(num_ops, 3)
    assert abs(len(problem.graph.ops) - num_ops) <= 0.1 * num_ops + 5
    labels = coarsen(problem.graph, 2).label
    layers = {label.split()[0] for label in labels if label.startswith("layers")}
    assert {f"{layer} {path}" for layer in layers for path in ("main", "side")} <= set(labels)


def test_layered_graphs_are_the_same_for_the_same_seed() -> None:
    """And others for another."""
    one, same, other = (layered_problem(300, 2, seed) for seed in (0, 0, 1))
    assert one.graph == same.graph
    assert (one.costs.compute_ns == same.costs.compute_ns).all()
    assert (one.costs.compute_ns != other.costs.compute_ns).any()


def test_more_devices_make_a_layered_step_shorter() -> None:
    """Its wavefronts run at once."""
    steps = [place(layered_problem(1000, count), Search(), "600ev").step_ns for count in (1, 2, 4)]
    assert steps[0] > steps[1] > steps[2]
