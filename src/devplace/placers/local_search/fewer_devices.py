"""Plans on fewer devices that are nearly as fast."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.local_search.classes import BestPlacement
from devplace.problem import Problem

MAX_TRIED = 8
"""Devices that are tried to do without, and in place of each, those with the least work first."""


def with_fewer_devices(
    problem: Problem, evaluate: Evaluator, begin: BestPlacement, most_ns: int
) -> BestPlacement:
    """Do without one device after the other: all its groups go to another one.

    Args:
        problem: What is placed.
        evaluate: The simulator; nothing is counted.
        begin: A plan that fits.
        most_ns: Step time up to which a plan on fewer devices is taken.
    """
    found: BestPlacement | None = begin
    while found is not None and not _is_late(evaluate):
        begin = found
        found = _without_one(problem, evaluate, begin, most_ns)
    return found or begin


def _is_late(evaluate: Evaluator) -> bool:
    """Whether a budget of time is exceeded by a tenth."""
    most = evaluate.meter.budget.seconds
    return most is not None and evaluate.meter.seconds > 1.1 * most


def _without_one(
    problem: Problem, evaluate: Evaluator, begin: BestPlacement, most_ns: int
) -> BestPlacement | None:
    tasks, duration_ns = problem.core.tasks, problem.core.wires.duration_ns
    device = problem.spaces.tasks_from_groups(begin.groups)
    work_ns = np.bincount(
        device, duration_ns[np.arange(tasks.num_tasks), device], duration_ns.shape[1]
    )
    used = sorted(np.unique(begin.groups).tolist(), key=lambda d: (work_ns[d], d))
    for left_out in used[:MAX_TRIED]:
        moved = begin.groups == left_out
        others = [d for d in used if d != left_out and problem.allowed[moved, d].all()]
        if not others:
            continue
        rows = np.array(
            [np.where(moved, d, begin.groups) for d in others[:MAX_TRIED]], begin.groups.dtype
        )
        step_ns, overflow = evaluate.uncounted(
            problem.spaces.tasks_from_groups(rows), begin.priority, begin.in_turn
        )
        step_ns = np.where(overflow > 0, np.iinfo(np.int64).max, step_ns)
        best = int(step_ns.argmin())
        if step_ns[best] <= most_ns:
            return replace(begin, groups=rows[best], step_ns=int(step_ns[best]))
    return None


def names_of(problem: Problem, groups: NDArray[np.int32]) -> str:
    """The devices of a plan, as messages call them."""
    names = [problem.machine.device_names[d] for d in np.unique(groups)]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
