"""Optimal placements and orders of tiny problems by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from devplace.errors import InfeasibleError, InputError
from devplace.problem import Placement, Problem
from devplace.schedule import waiting_ops
from devplace.simulator import make_kernel
from devplace.simulator.in_order import simulate_in_order

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
MAX_ORDERED = 7


class BruteForceBest(NamedTuple):
    """The best placement there is.

    Attributes:
        step_ns: Its step time.
        placement: Devices; no priorities under critical-path order.
    """

    step_ns: int
    placement: Placement


def brute_force(problem: Problem, most: int = 200_000) -> BruteForceBest:
    """Try every placement of the colocation groups that keeps the demands and memory limits.

    Every placement runs in critical-path order; another order may be faster still.

    Args:
        problem: What is placed.
        most: Placements to try at most.

    Raises:
        InfeasibleError: None fits.
        InputError: More than `most` placements.

    Complexity: D^G simulations; seconds for 8 groups on 3 devices, hours for 20 groups.
    """
    kernel = make_kernel(problem.core)
    best: tuple[int, I32] | None = None
    count = 0
    for devices in _every_placement(problem, most):
        count += len(devices)
        found = _fastest(problem, kernel.evaluate(devices, None))
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], devices[found[1]])
    if best is None:
        raise InfeasibleError(f"None of the {count} placements fits the memory limits.")
    return BruteForceBest(best[0], Placement(problem.spaces.op_devices(best[1])))


def brute_force_orders(problem: Problem, most: int = 20_000, waits: bool = True) -> BruteForceBest:
    """Try every placement with every order.

    Args:
        problem: What is placed.
        most: Placements to try at most, and orders that wait.
        waits: Try all orders of every device, also those in which a device waits for an op while
            another is ready. Else only what priorities can give.

    Raises:
        InfeasibleError: None fits.
        InputError: More than `MAX_ORDERED` ops that take part in the order, or more than `most`.

    Complexity: D^G N! simulations.
    """
    tasks = problem.core.tasks
    work = np.flatnonzero(tasks.is_source == 0)
    if len(work) > MAX_ORDERED:
        raise InputError(f"All orders are tried of {MAX_ORDERED} ops at most, not {len(work)}.")
    kernel = make_kernel(problem.core)
    best: tuple[int, Placement] | None = None
    for devices in _every_placement(problem, most):
        for ranks in itertools.permutations(range(len(work))):
            priority = np.zeros(tasks.num_tasks, np.int64)
            priority[work] = ranks
            found = _fastest(problem, kernel.evaluate(devices, priority))
            if found is not None and (best is None or found[0] < best[0]):
                own = problem.spaces.op_devices(devices[found[1]])
                best = (found[0], Placement(own, problem.spaces.ops_from_tasks(priority)))
    if waits:
        best = _waiting(problem, most, best)
    if best is None:
        raise InfeasibleError("None of the placements fits the memory limits, in any order.")
    return BruteForceBest(*best)


def _waiting(
    problem: Problem, most: int, best: tuple[int, Placement] | None
) -> tuple[int, Placement] | None:
    """The best order of every device, if it is better than `best`."""
    tasks, wires = problem.core.tasks, problem.core.wires
    tried = 0
    for rows in _every_placement(problem, most):
        for row in rows:
            own = [
                np.flatnonzero((row == d) & (tasks.is_source == 0)) for d in range(len(wires.pool))
            ]
            tried += math.prod(math.factorial(len(part)) for part in own)
            if tried > most:
                raise InputError(f"More than {most} orders to try.")
            choices = (itertools.permutations(tasks.task_op[part].tolist()) for part in own)
            for order in itertools.product(*choices):
                if waiting_ops(problem.graph, order) is not None:
                    continue
                placement = Placement(problem.spaces.op_devices(row), None, order)
                run = simulate_in_order(problem, placement, order).run
                fits = (run.peak_bytes <= wires.limit_bytes).all()
                fits &= (run.pool_peak_bytes <= wires.pool_limit_bytes).all()
                if fits and (best is None or run.makespan_ns < best[0]):
                    best = (run.makespan_ns, placement)
    return best


def _every_placement(problem: Problem, most: int) -> Iterator[I32]:
    """Devices of tasks, some placements at a time. `[B, N]`"""
    choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
    count = math.prod(len(options) for options in choices)
    if count > most:
        raise InputError(f"Brute force tries at most {most} placements, this problem has {count}.")
    every = itertools.product(*choices)
    while rows := list(itertools.islice(every, 256)):
        groups = np.array(rows, np.int32).reshape(len(rows), -1)
        yield problem.spaces.tasks_from_groups(groups)


def _fastest(problem: Problem, scores: Any) -> tuple[int, int] | None:
    """Step time and row of the fastest placement that fits."""
    wires = problem.core.wires
    fits = (scores.peak_bytes <= wires.limit_bytes).all(axis=1)
    fits &= (scores.pool_peak_bytes <= wires.pool_limit_bytes).all(axis=1)
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    row = int(rows[scores.makespan_ns[rows].argmin()])
    return int(scores.makespan_ns[row]), row
