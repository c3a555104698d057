"""Simulate a placement, with or without a given order."""

from __future__ import annotations

from devplace.errors import ProblemError
from devplace.problem import Placement, Problem
from devplace.simulator.in_order import simulate_in_order
from devplace.simulator.kernel import SimulatorKernel, make_kernel
from devplace.simulator.timeline import Timeline, priorities, timeline_of


def simulate(
    problem: Problem, placement: Placement, kernel: SimulatorKernel | None = None
) -> Timeline:
    """Simulate one step of `placement`.

    Never raises on an over-full device: `Timeline.missing_bytes` tells by how much.

    Args:
        problem: What is placed.
        placement: Device per op and, optionally, priorities or an order.
        kernel: Simulator to use; the fastest at hand by default. An order is simulated by the
            fastest in any case.

    Raises:
        ProblemError: The placement does not fit the problem's ops or devices, breaks a demand
            (`Problem.violations`), or has an order that devices cannot keep to.

    Complexity: O((N + E) log N), about 1 ms for 10,000 ops with the native simulator.
    """
    broken = problem.violations(placement)
    if broken:
        raise ProblemError(f"The placement breaks a rule: {broken[0]}. Change it, or the problem.")
    if placement.order is not None:
        return simulate_in_order(problem, placement, placement.order)
    kernel = kernel or make_kernel(problem.core)
    device = problem.task_devices(placement)
    priority = priorities(problem, placement, device, kernel)
    return timeline_of(problem, device, kernel.trace(device, priority))
