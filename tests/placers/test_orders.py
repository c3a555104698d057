"""The order of the trace, where it is better than critical paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from devplace.errors import InfeasibleError
from devplace.placers import Expert, Greedy, Layers, MinCutRepaired, Search, Single, place
from devplace.placers.margin_retry import with_priority
from devplace.placers.orders import has_micro_batches, in_trace_order
from devplace.placers.simple.single import all_on
from devplace.problem import Placement, Problem
from devplace.simulator import make_kernel, simulate
from devplace.testing import hand_machine, hand_problem


def step(parts: int, unit: int = 1) -> str:
    """Two layers, forward and back, for each of some micro-batches; each leaves 10 units per layer
    until it has gone back, and the sum of the gradients 1."""
    lines = [f"x = input bytes={unit}"]
    for k in range(parts):
        lines += [
            f"a{k} = f(x) bytes={10 * unit} ns=5 module=l.0",
            f"b{k} = f(a{k}) bytes={10 * unit} ns=5 module=l.1",
            f"d{k} = f(b{k}) bytes={unit} ns=5 module=l.1",
            f"e{k} = f(a{k}, d{k}) bytes={unit} ns=5 module=l.0",
        ]
        before = f", s{k - 1}" if k else ""
        lines.append(f"s{k} = add(e{k}{before}) bytes={unit} ns=1 module=l.0")
    lines[-1] += " result=output"
    return "\n".join(lines)


def problem_of(parts: int, machine: Any, unit: int = 1, **demands: Any) -> Problem:
    problem = hand_problem(step(parts, unit), machine, **demands)
    graph = replace(problem.graph, meta={"micro_batches": parts})
    return replace(problem, graph=graph)


ONE = hand_machine({"gpu:0": 10_000})
TWO = hand_machine({"gpu:0": 10_000, "gpu:1": 10_000}, latency_ns=1)


def critical(problem: Problem, placement: Placement) -> Placement:
    priority = make_kernel(problem.core).priority(problem.task_devices(placement))
    return Placement(placement.devices, problem.spaces.ops_from_tasks(priority))


def test_one_device_takes_one_micro_batch_after_the_other() -> None:
    """The step is as long, and holds the tensors of one micro-batch instead of all eight."""
    problem = problem_of(8, ONE)
    result = place(problem, Single(), "9ev")
    order = [problem.graph.ops[op].name for op in result.timeline.order[0]]
    assert order == [op.name for op in problem.graph.ops if not op.is_source]
    by_path = simulate(problem, critical(problem, all_on(problem, 0)))
    assert result.step_ns == by_path.makespan_ns
    assert result.timeline.peak_bytes[0] < 30 < 80 < by_path.peak_bytes[0]


@pytest.mark.parametrize("placer", [Single(), Search(), Layers()])
def test_a_limit_that_only_this_order_keeps_is_kept(placer: Any) -> None:
    """Room for one micro-batch is enough, with micro-batches or for any step that needs it."""
    for parts in (8, 1):
        problem = problem_of(8, ONE, limits={"gpu:0": 30})
        problem = replace(problem, graph=replace(problem.graph, meta={"micro_batches": parts}))
        assert not simulate(problem, critical(problem, all_on(problem, 0))).is_feasible
        assert place(problem, placer, "99ev").is_feasible
    with pytest.raises(InfeasibleError):
        place(problem_of(8, ONE, limits={"gpu:0": 15}), placer, "99ev")


@pytest.mark.parametrize(
    "placer", [Single(), Search(), Greedy(), Layers(), Expert(), MinCutRepaired()]
)
@pytest.mark.parametrize("parts", [8, 1])
def test_a_device_that_only_this_order_fits_into_is_not_passed_over(
    placer: Any, parts: int
) -> None:
    """A CPU has room for any order and takes 50 times as long: the GPU is taken, and gets its byte
    of the batch in 2 ns."""
    problem = problem_of(8, hand_machine({"gpu:0": 30, "cpu:0": 10_000}, latency_ns=1))
    costs = replace(problem.costs, compute_ns=problem.costs.compute_ns * [1, 50])
    graph = replace(problem.graph, name="resnet", meta={"micro_batches": parts})
    result = place(replace(problem, graph=graph, costs=costs), placer, "99ev")
    assert result.step_ns <= 2 + 8 * 21
    assert result.history[-1][2] == result.step_ns


def test_a_pipeline_is_no_longer_and_holds_less() -> None:
    """Layers on two devices: turns as in 1F1B are taken where they are as short."""
    problem = problem_of(8, TWO)
    result = place(problem, Layers(), "9ev")
    by_path = simulate(problem, critical(problem, result.placement))
    assert result.step_ns <= by_path.makespan_ns
    assert result.history[-1][2] == result.step_ns
    merit = (result.step_ns, result.timeline.peak_bytes.sum())
    assert merit < (by_path.makespan_ns, by_path.peak_bytes.sum())


def test_without_micro_batches_critical_paths_stay() -> None:
    """One batch that fits keeps to critical paths; so does what has priorities of its own."""
    problem = hand_problem(step(8), TWO)
    assert not has_micro_batches(problem)
    placement = Placement(np.zeros(len(problem.graph.ops), np.int32))
    found = with_priority(problem, placement)
    assert np.array_equal(found.priority, critical(problem, placement).priority)
    own = in_trace_order(problem, placement)
    assert with_priority(problem, own) is own
