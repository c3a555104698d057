"""Priorities in trace order: micro-batch by micro-batch, gradients as they become ready."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator, Score
from devplace.problem import Placement, Problem


def in_trace_order(problem: Problem, placement: Placement) -> Placement:
    """The placement with the ops that come first in the graph first wherever several are ready.

    Critical-path priorities let all micro-batches go forward before the first goes back, which
    keeps what each needs for that, and put gradients of weights off. In the order of the trace a
    pipeline takes turns, as in 1F1B (Narayanan et al. 2019, PipeDream, section 3.2).
    """
    priority: NDArray[np.int64] = np.arange(len(problem.graph.ops), 0, -1, dtype=np.int64)
    return Placement(placement.devices, priority)


def has_micro_batches(problem: Problem) -> bool:
    """Whether the step takes its batch in parts; critical paths and the trace then differ much."""
    return int(problem.graph.meta.get("micro_batches", 1)) > 1


def best_score(evaluate: Evaluator, placement: Placement) -> Score:
    """The score of a placement; of one without priorities that of the better order.

    That is the one which `place` gives it in the end. A second evaluation is used where critical
    paths do not fit, or there are micro-batches.
    """
    score = evaluate(placement)
    if placement.priority is not None or placement.order is not None:
        return score
    if score.is_feasible and not has_micro_batches(evaluate.problem):
        return score
    traced = evaluate(in_trace_order(evaluate.problem, placement))
    return min(score, traced, key=lambda one: one.key)
