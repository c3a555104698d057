"""The best placement by trying them all."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devplace.errors import InfeasibleError, InputError
from devplace.problem import Placement, Problem
from devplace.simulator import make_kernel


class Best(NamedTuple):
    """The best placement there is, under critical-path order.

    Attributes:
        step_ns: Its step time.
        placement: Devices; no priorities.
    """

    step_ns: int
    placement: Placement


def brute_force(problem: Problem, most: int = 200_000) -> Best:
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
    tasks, wires = problem.core.tasks, problem.core.wires
    choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
    count = 1
    for options in choices:
        count *= len(options)
    if count > most:
        raise InputError(f"Brute force tries at most {most} placements, this problem has {count}.")
    kernel = make_kernel(problem.core)
    best: tuple[int, NDArray[np.int32]] | None = None
    every = itertools.product(*choices)
    while rows := list(itertools.islice(every, 256)):
        groups = np.array(rows, np.int32).reshape(len(rows), -1)
        scores = kernel.evaluate(np.ascontiguousarray(groups[:, tasks.group]), None)
        fits = (scores.peak_bytes <= wires.limit_bytes).all(axis=1)
        fits &= (scores.pool_peak_bytes <= wires.pool_limit_bytes).all(axis=1)
        for row in np.flatnonzero(fits):
            if best is None or int(scores.makespan_ns[row]) < best[0]:
                best = (int(scores.makespan_ns[row]), groups[row])
    if best is None:
        raise InfeasibleError(f"None of the {count} placements fits the memory limits.")
    return Best(best[0], Placement(problem.expand(best[1][tasks.group])))
