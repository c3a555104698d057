"""The verifier of steps against the simulator."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplace.placers import Heft, place
from devplace.problem import Placement
from devplace.simulator import simulate
from devplace.simulator.in_order import simulate_in_order
from devplace.testing import tiny_problems
from devplace.verify import verify_placement, verify_plan, verify_step
from tests.strategies import problems, random_placement


@settings(max_examples=300, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_verifier_equals_simulator(problem, seed):
    """Times, transfers and peaks are those of the simulator, to the nanosecond and byte."""
    placement = random_placement(problem, np.random.default_rng(seed))
    timeline = simulate(problem, placement)
    verdict = verify_placement(problem, placement)
    assert verdict.step_ns == timeline.makespan_ns
    for op in verdict.seen.sequence:
        assert verdict.seen.start_ns[op] == timeline.start_ns[op]
        assert verdict.seen.finish_ns[op] == timeline.finish_ns[op]
    sent = [(s.tensor, s.src, s.dst, s.request_ns, s.arrival_ns) for s in verdict.seen.sent]
    told = [(t.tensor, t.src, t.dst, t.request_ns, t.arrival_ns) for t in timeline.transfers]
    assert sent == told
    assert verdict.peak_bytes == tuple(timeline.peak_bytes.tolist())
    assert verdict.pool_peak_bytes == tuple(timeline.pool_peak_bytes.tolist())
    assert (not verdict.broken) == timeline.is_feasible


@settings(max_examples=100, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_verifier_equals_simulator_in_order(problem, seed):
    """Where each op waits for its turn, too."""
    rng = np.random.default_rng(seed)
    placement = random_placement(problem, rng)
    tasks = problem.core.tasks
    device = problem.task_devices(placement)
    order = [[] for _ in problem.machine.devices]
    for task, op in enumerate(tasks.task_op.tolist()):
        if not tasks.is_source[task]:
            order[device[task]].append(op)
    timeline = simulate_in_order(problem, placement, order)
    priority = None if placement.priority is None else placement.priority.tolist()
    verdict = verify_step(problem, placement.devices.tolist(), priority, order)
    assert verdict.step_ns == timeline.makespan_ns
    assert verdict.peak_bytes == tuple(timeline.peak_bytes.tolist())


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_plans_are_valid(tiny):
    """A placer's plan breaks no rule, and what it predicts is what comes out."""
    result = place(tiny.problem, Heft(), "10ev", allow_infeasible=True)
    verdict = verify_plan(tiny.problem, result.plan)
    assert verdict.step_ns == result.step_ns
    assert (not verdict.broken) == result.is_feasible, verdict.broken


def test_broken_rules_are_named():
    """Parted groups, unknown devices, lies about the step and circles of waiting are told."""
    tiny = next(tiny for tiny in tiny_problems() if tiny.name == "update stays home")
    problem = tiny.problem
    result = place(problem, Heft(), "10ev")
    index = problem.graph.op_index
    parted = np.array(result.plan.placement, np.int32)
    parted[index["w"]] = 1 - parted[index["w"]]
    assert "share a device" in verify_placement(problem, Placement(parted)).broken[0]
    assert "on device 7" in verify_placement(problem, Placement(parted * 0 + 7)).broken[0]
    predicted = dataclasses.replace(
        result.plan, predicted=type(result.plan.predicted)(1, {"gpu:0": 1}, 0, 0)
    )
    broken = verify_plan(problem, predicted).broken
    assert any("predicts 1 ns" in text for text in broken)
    order = [list(reversed(row)) for row in result.plan.order]
    verdict = verify_step(problem, result.plan.placement, result.plan.priority, order)
    assert "wait for each other" in verdict.broken[0]
