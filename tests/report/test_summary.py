"""The summary of a plan."""

from __future__ import annotations

from tests.report.steps import OP_NS, chain_graph, machine, make_problem, placed, wide_graph

from devplace.report import best_single, plan_summary
from devplace.report.summary import idle_text, longest_idle


def test_s75_summary_has_step_bound_and_search_cost() -> None:
    """Predicted step, bound, evaluations and seconds of the search are all there."""
    text = plan_summary(placed(make_problem(chain_graph(2), machine(2)), {"layer0": "cuda:0"}))
    lines = dict(line.split("  ", 1) for line in text.splitlines())
    assert "6 ms predicted, 1.33x the speed of cuda:0 alone (8 ms)" in lines["step"]
    assert "6 ms; the step is 0.0% above it" in lines["lower bound"]
    assert "busy 50%, memory 3.2 KB of 1 GB" in text
    assert "200 B in 2 transfers" in text
    assert "1 evaluations in" in text
    assert "seed 0" in text


def test_a_plan_that_does_not_fit_says_so() -> None:
    """The summary names the device and what it lacks."""
    text = plan_summary(placed(make_problem(chain_graph(2), machine(1, memory=5000))))
    assert "cuda:0 lacks 104 B" in text


def test_best_single_prefers_a_device_that_fits() -> None:
    """A slow device with room goes before a fast one without."""
    problem = make_problem(chain_graph(2), machine(1, memory=5000, with_cpu=True))
    assert best_single(problem).makespan_ns == 80 * OP_NS


def test_longest_idle_names_what_is_waited_for() -> None:
    """cuda:0 waits 3 ms for the gradient that cuda:1 computes."""
    timeline = placed(
        make_problem(chain_graph(2), machine(2)), {"layer0": "cuda:0"}, "cuda:1"
    ).timeline
    idle = longest_idle(timeline)
    assert idle is not None
    assert (idle.device, idle.start_ns) == (0, OP_NS)
    text = idle_text(timeline, idle)
    assert "cuda:0 for 3 ms before g0 (layer0): waits for d1, which cuda:1 still computes" in text


def test_idle_at_the_end_and_no_idle_at_all() -> None:
    """A device that has finished early is told; one busy device never waits."""
    problem = make_problem(wide_graph(3), machine(2))
    early = placed(problem, {"b0": "cuda:0"}, "cuda:1").timeline
    assert "nothing left to do after 1 ms" in idle_text(early, longest_idle(early))
    alone = placed(problem, default="cuda:0").timeline
    assert longest_idle(alone) is None
    assert "no device ever waits" in idle_text(alone, None)
