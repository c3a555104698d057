"""Changes that make a step faster."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.report.steps import chain_graph, machine, make_problem, placed

from devplace.placers import place
from devplace.problem import Placement, Problem
from devplace.report.what_if import changes
from devplace.testing import hand_machine, hand_problem


def test_the_only_device_twice_as_fast_halves_the_step() -> None:
    """All work is on one device, so half of every op's time is saved; that comes first."""
    result = placed(make_problem(chain_graph(4), machine(1)))
    first = changes(result)[0]
    assert first.what == "cuda:0 twice as fast"
    assert first.step_ns == result.timeline.makespan_ns // 2
    assert first.text.endswith("50% less")


def test_changes_are_at_most_three_and_sorted() -> None:
    """The shortest step first; each is shorter than the plan's; without transfers no link helps."""
    result = placed(make_problem(chain_graph(6), machine(2)), {"layer0": "cuda:0"}, "cuda:1")
    steps = [change.step_ns for change in changes(result)]
    assert 0 < len(steps) <= 3
    assert steps == sorted(steps)
    assert steps[-1] < result.timeline.makespan_ns
    alone = placed(make_problem(chain_graph(6), machine(2)))
    assert not any("links" in change.what for change in changes(alone))


class Given:
    """A placer that gives one placement with priorities."""

    name = "given"

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(self, problem: Problem, evaluate: Any, rng: Any) -> Placement:
        """The placement."""
        evaluate(self._placement)
        return self._placement


def test_no_change_gains_what_only_another_order_does() -> None:
    """`late` comes from `early` after 1.8 ms, when `long` runs already: the step is 22 ms. Twice as
    fast, gpu:1 saves 5 ms at the end of it. In a new order `late` would be first, after 1 ms, and
    the step 12 ms.

    gpu:0: first 0-1  long 1-11  late 11-12
    gpu:1: early 0-1.8                       end 12-22
    """
    problem = hand_problem(
        """
        x = input
        first = mm(x) ns=1000000
        early = mm(x) ns=1800000 module=early
        long = mm(first) ns=10000000 module=long result=output
        late = mm(early,first) ns=1000000 module=late
        end = mm(late) ns=10000000 module=end result=output
        """,
        hand_machine({"gpu:0": 1000, "gpu:1": 1000}, bytes_per_ns=1000.0),
    )
    names = [op.name for op in problem.graph.ops]
    devices = np.array([int(name in ("early", "end")) for name in names], np.int32)
    priority = np.array([10 - names.index(name) for name in names], np.int64)
    priority[names.index("late")] = 20
    result = place(problem, Given(Placement(devices, priority)), "1ev")
    base = result.timeline.makespan_ns
    assert 22_000_000 <= base < 22_001_000
    (found,) = (change for change in changes(result) if change.what == "gpu:1 twice as fast")
    assert 17_000_000 <= found.step_ns < 17_001_000
