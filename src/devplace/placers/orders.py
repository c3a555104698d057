"""Orders for placements that have none: of the trace, of zero-bubble schedules, of 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator, Score
from devplace.placers.turns import placed_in_turn, turns_by
from devplace.problem import Placement, Problem

I64 = NDArray[np.int64]


def in_trace_order(problem: Problem, placement: Placement) -> Placement:
    """The placement with the ops that come first in the graph first wherever several are ready.

    Critical-path priorities let all micro-batches go forward before the first goes back, which
    keeps what each needs for that, and put gradients of weights off. In the order of the trace a
    pipeline takes turns, as in 1F1B (Narayanan et al. 2019, PipeDream, section 3.2).
    """
    priority: I64 = np.arange(len(problem.graph.ops), 0, -1, dtype=np.int64)
    return Placement(placement.devices, priority)


def with_weights_last(problem: Problem, placement: Placement) -> Placement:
    """As `in_trace_order`, but ops that only the update of a parameter needs come after all others.

    A device computes gradients of weights when it would else wait, as zero-bubble schedules do (Qi,
    Wan, Huang, Lin 2023, Zero bubble pipeline parallelism, arXiv 2401.10241, section 2). Differs
    from these in that nothing is held back.
    """
    count = len(problem.graph.ops)
    priority = np.arange(count, 0, -1, dtype=np.int64) + count * ~problem.is_side
    return Placement(placement.devices, priority)


def held_back(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """Orders in which devices wait although an op is ready, so that less is held at once.

    With micro-batches: 1F1B with gradients of weights put off, and 1F1B; in any case the order of
    the trace, where what is computed again stays close to where it is read.
    """
    device = problem.task_devices(placement)
    if has_micro_batches(problem):
        for is_late in (True, False):
            turn = turns_by(problem, _slots(problem, device, is_late))
            yield placed_in_turn(problem, device, turn)
    yield placed_in_turn(problem, device, np.arange(len(device), 0, -1, dtype=np.int64))


def _slots(problem: Problem, device: NDArray[np.int32], is_late: bool) -> I64:
    """When each task runs in 1F1B, in units of one pass of one micro-batch through one stage. `[N]`

    A stage is a device; stages are in the order of their forward ops. With `p` stages, stage `k`
    begins with `p - k` micro-batches and then takes turns: one backward, one forward (Narayanan et
    al. 2019, PipeDream, section 3.2). With `is_late`, gradients of weights come `k` micro-batches
    later, so that no stage holds more than the first (ZB-H1, section 2 of Qi et al. 2023).
    """
    tasks, ops = problem.core.tasks, problem.graph.ops
    of_task = [ops[op] for op in tasks.task_op]
    batch = np.array([op.micro_batch for op in of_task])
    forward = np.array([op.stage == "forward" for op in of_task])
    stage = _stages(problem, device, forward & (batch <= max(0, int(batch.min(initial=0)))))
    count, k = int(stage.max(initial=0)) + 1, stage[device]
    ahead = count - k
    starts = np.where(batch < ahead, k + batch, k + 2 * batch)
    backs = 2 * count - 1 - k + 2 * batch
    if is_late:
        backs = backs + 2 * k * problem.spaces.tasks_from_ops(problem.is_side)
    slot: I64 = np.where(forward, starts, backs).astype(np.int64)
    last = np.array([op.stage == "update" for op in of_task]) | (~forward & (batch < 0))
    slot[forward & (batch < 0)] = -1
    slot[last] = np.iinfo(np.int32).max
    return slot


def _stages(problem: Problem, device: NDArray[np.int32], first: NDArray[np.bool_]) -> I64:
    """Place of each device in the pipeline: by the mean place of the `first` tasks there. `[D]`"""
    count = problem.core.num_devices
    place = np.bincount(device[first], np.flatnonzero(first), count)
    number = np.bincount(device[first], minlength=count)
    mean = np.where(number > 0, place / np.maximum(number, 1), np.inf)
    rank: I64 = np.argsort(np.argsort(mean, kind="stable"), kind="stable").astype(np.int64)
    return rank.clip(0, max(0, int((number > 0).sum()) - 1))


def has_micro_batches(problem: Problem) -> bool:
    """Whether the step takes its batch in parts; critical paths and the trace then differ much."""
    return int(problem.graph.meta.get("micro_batches", 1)) > 1


def priorities_of(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """A placement without priorities in the orders to try: critical paths; then, where they do not
    fit or there are micro-batches, the trace; with micro-batches also gradients of weights last."""
    yield placement
    yield in_trace_order(problem, placement)
    if has_micro_batches(problem):
        yield with_weights_last(problem, placement)


def best_of(
    problem: Problem, tried: Iterator[Placement], merit: Callable[[Placement], tuple[int, ...]]
) -> tuple[Placement, tuple[int, ...]]:
    """The best of orders of one placement, with its merit: the first where it fits and there are no
    micro-batches.

    Args:
        problem: What is placed.
        tried: Orders, the usual one first.
        merit: Bytes over the limits, then what else should be small.
    """
    best = next(tried)
    known = merit(best)
    if known[0] == 0 and not has_micro_batches(problem):
        return best, known
    for placement in tried:
        found = merit(placement)
        if found < known:
            best, known = placement, found
    return best, known


def best_score(evaluate: Evaluator, placement: Placement) -> Score:
    """The score of a placement; of one without priorities that of the best priorities.

    That is what `place` gives it in the end, unless holding ops back lets it fit. More evaluations
    than one are used where critical paths do not fit, or there are micro-batches.
    """
    if placement.priority is not None or placement.order is not None:
        return evaluate(placement)
    orders = priorities_of(evaluate.problem, placement)
    _, (overflow, step) = best_of(evaluate.problem, orders, lambda one: evaluate(one).key)
    return Score(step, overflow)
