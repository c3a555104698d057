"""Changes that make a step faster."""

from __future__ import annotations

from tests.report.steps import chain_graph, machine, make_problem, placed

from devplace.report.what_if import changes


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
