"""The summary of a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.report.steps import (
    OP_NS,
    chain_graph,
    machine,
    make_problem,
    placed,
    rendered,
    wide_graph,
)

from devplace.cost import CostTable
from devplace.placers import Single, place
from devplace.problem import Placement, Problem
from devplace.report import best_single, comparison_table, explain, plan_summary
from devplace.report.summary import idle_text, longest_idle
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_problem


def test_one_device_is_not_called_alone_where_pins_part_it() -> None:
    """With a layer pinned to each GPU no step is on one alone: what speed-ups are over says so."""
    pins = {"layer0": "cuda:0", "layer1": "cuda:1"}
    result = placed(make_problem(chain_graph(2), machine(2), pins=pins), {"layer0": "cuda:0"})
    assert "x the speed of one device as far as pins and kernels allow (" in plan_summary(result)
    assert "one device as far as pins and kernels allow takes" in explain(result.timeline).text
    text = " ".join(rendered(comparison_table([result]), 100).split())
    assert "Speed-up is over one device as far as pins and kernels allow." in text


def test_s75_summary_has_step_bound_and_search_cost() -> None:
    """Predicted step, bound, evaluations and seconds of the search are all there."""
    text = plan_summary(placed(make_problem(chain_graph(2), machine(2)), {"layer0": "cuda:0"}))
    lines = dict(line.split("  ", 1) for line in text.splitlines())
    assert "6 ms predicted, 1.33x the speed of cuda:0 alone (8 ms)" in lines["step"]
    assert "6 ms; the step is 0.0% above it" in lines["lower bound"]
    assert "busy 50%, memory 3.12 KiB of 954 MiB" in text
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


CHUNKS = """
    x = input bytes=1
    w = parameter bytes=1
    f0 = f(x, w) bytes=10 ns=1000 micro_batch=0
    g0 = g(f0, w) bytes=1 ns=1000 micro_batch=0
    f1 = f(x, w) bytes=10 ns=1000 micro_batch=1
    g1 = g(f1, w) bytes=1 ns=1000 micro_batch=1
    f2 = f(x, w) bytes=10 ns=1000 micro_batch=2
    g2 = g(f2, w) bytes=1 ns=1000 micro_batch=2
    u = sgd(w, g0, g1, g2) bytes=1 ns=10 replaces=w
"""


def in_chunks(text: str, devices: dict[str, int], slow: str, **demands: Any) -> Problem:
    """A step in three micro-batches, with one device that is slower."""
    made = hand_machine(devices, speed={name: 1 if name == slow else 10 for name in devices})
    problem = hand_problem(text, made)
    graph = dataclasses.replace(problem.graph, meta={"micro_batches": 3})
    costs = problem.costs.compute_ns.copy()
    costs[:, made.device_names.index(slow)] *= 10
    return Problem(graph, made, CostTable(costs, "hand"), **demands)


@pytest.mark.parametrize("room", [10, 14, 15, 20, 30, 40, 100])
def test_the_best_single_device_is_that_of_the_placer_single(room: int) -> None:
    """Where only an order that saves memory fits on the fast device, speed-ups are over that, not
    over a slower device: the same step as the placer's, in the summary and in the table."""
    problem = in_chunks(CHUNKS, {"cuda:0": room, "cpu:0": 1000}, "cpu:0")
    placed_there = place(problem, Single(), "50ev")
    assert best_single(problem).makespan_ns == placed_there.step_ns
    assert "as fast as" in plan_summary(placed_there)
    assert "1.00x" in rendered(comparison_table([placed_there]), 100)
    assert bool(placed_there.timeline.order[0]) == (room >= 15)  # one activation at a time


def test_a_plan_on_one_device_is_its_own_baseline() -> None:
    """A step on one device that only an order of its own makes fit is no case of `no single device
    can hold it`; and what does not fit in the orders tried is not called impossible."""
    text = """
        a = f bytes=10 ns=1000
        b = f bytes=10 ns=1000
        c = g(a) bytes=1 ns=1
        d = g(b) bytes=1 ns=1
        e = join(c, d) bytes=1 ns=1 result=loss
    """
    problem = hand_problem(text, hand_machine({"cuda:0": 12}))
    assert not best_single(problem).is_feasible
    in_turn = Placement(np.zeros(5, np.int32), None, ((0, 2, 1, 3, 4),))
    timeline = simulate(problem, in_turn)
    assert timeline.is_feasible
    assert best_single(problem, [timeline]) is timeline
    result = dataclasses.replace(place(problem, Single(), allow_infeasible=True), timeline=timeline)
    assert "as fast as cuda:0 alone" in plan_summary(result)
    assert "no single device can hold it" not in plan_summary(result)
    full = place(problem, Single(), allow_infeasible=True)
    assert "no order tried fits on a single device (cuda:0 lacks" in plan_summary(full)


def test_no_single_device_can_hold_it_is_told_where_it_is_proved() -> None:
    """Parameters that are too many for any device, or an op that is."""
    problem = make_problem(chain_graph(4), machine(2, memory=3900))
    split = {"layer0": "cuda:0", "layer1": "cuda:0"}
    assert "no single device can hold it" in plan_summary(placed(problem, split, "cuda:1"))


def test_without_a_device_that_fits_the_baseline_is_the_fastest() -> None:
    """Speed-up is then over one device without its limit, and not over the one that lacks least."""
    problem = make_problem(chain_graph(4), machine(1, memory=2000, with_cpu=True))
    problem = dataclasses.replace(problem, limits={"cpu:0": 3000})
    assert not best_single(problem).is_feasible
    assert best_single(problem).makespan_ns < 17 * OP_NS
