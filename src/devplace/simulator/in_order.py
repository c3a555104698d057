"""Simulate a placement in a given order: every op waits for its turn on its device."""

from __future__ import annotations

import numpy as np

from devplace.errors import ProblemError
from devplace.problem import Placement, Problem
from devplace.schedule.order import Order, order_fault
from devplace.simulator.kernel import make_kernel
from devplace.simulator.timeline import Timeline, priorities, timeline_of


def simulate_in_order(problem: Problem, placement: Placement, order: Order) -> Timeline:
    """Simulate one step whose devices keep to `order`, as a running plan does.

    List simulation lets a ready op overtake one that still waits; here none can. On a device with
    several streams ops may overlap: there the order is only a priority.

    Args:
        problem: What is placed.
        placement: Device per op; its priorities decide only which of two transfers requested at
            the same instant is served first.
        order: Per device the indices of its ops.

    Raises:
        ProblemError: Devices cannot keep to this order (`order_fault`), or the placement does not
            fit the problem's ops and devices.
    """
    device = problem.task_devices(placement)
    devices = problem.spaces.op_devices(device).tolist()
    fault = order_fault(problem.graph, devices, order, problem.machine.device_names)
    if fault:
        raise ProblemError(fault)
    kernel, tasks = make_kernel(problem.core), problem.core.tasks
    priority = priorities(problem, placement, device, kernel)
    turn = np.zeros(tasks.num_tasks, np.int64)
    for streams, row in zip(problem.core.wires.streams, order, strict=True):
        places = problem.spaces.tasks_of(row)
        turn[places] = np.arange(len(row), 0, -1)
        if streams > 1 and (np.diff(priority[places]) >= 0).any():
            priority[places] = turn[places]  # these say the order already where they fall along it
    run = kernel.trace(device, priority, turn)
    return timeline_of(problem, device, run)
