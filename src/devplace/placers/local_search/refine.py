"""Improve a placement op by op where it matters: on the critical path."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from devplace.placers.local_search.classes import BestPlacement, Incumbent
from devplace.problem import Problem
from devplace.simulator.critical import critical_tasks, device_orders
from devplace.simulator.reference import CoreTimeline

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


def realised_tails(problem: Problem, device: I32, run: CoreTimeline) -> I64:
    """Longest time from each task's start to the end of the step in this very schedule.

    Counted are waits for the device (the next task on it), transfers as they happened, and
    durations. As priorities they move forward what this schedule turned out to need early.
    int64 `[N]`
    """
    tasks = problem.core.tasks
    length = (run.finish_ns - run.start_ns).tolist()
    after = [-1] * tasks.num_tasks
    for row in device_orders(problem.core, device, run):
        for first, second in pairwise(row):
            after[first] = second
    delay: dict[tuple[int, int], int] = {}
    for carrier, _, destination, request, _, arrival in run.transfers.tolist():
        delay[carrier, destination] = arrival - request
    out_ptr, cons_ptr = tasks.out_ptr.tolist(), tasks.cons_ptr.tolist()
    cons, where = tasks.cons.tolist(), device.tolist()
    tail = [0] * tasks.num_tasks
    # by falling end, so that everything behind a task is known before it
    order = np.lexsort((np.arange(tasks.num_tasks), run.sequence, run.finish_ns))[::-1]
    sources = tasks.is_source.astype(bool)
    for v in [*order[~sources[order]].tolist(), *np.flatnonzero(sources).tolist()]:
        behind = tail[after[v]] if after[v] >= 0 else 0
        for carrier in range(out_ptr[v], out_ptr[v + 1]):
            for reader in cons[cons_ptr[carrier] : cons_ptr[carrier + 1]]:
                way = tail[reader]
                if where[reader] != where[v]:
                    way += delay[carrier, where[reader]]
                behind = max(behind, way)
        tail[v] = length[v] + behind
    return np.array(tail, np.int64)


def refine_placement(
    incumbent: Incumbent, rng: np.random.Generator, devices: list[int], until: float, width: int
) -> None:
    """Move runs of ops on the critical path to another device while that helps.

    Improves `incumbent.best`; stops at this part of the budget, or when nothing has helped for a
    while.
    """
    problem, evaluate = incumbent.problem, incumbent.evaluate
    stale = 0
    while stale < 60 and evaluate.meter.fraction_spent < until and not evaluate.is_over:
        best = incumbent.best
        device = problem.spaces.tasks_from_groups(best.groups)
        priority = best.priority
        if priority is None:
            priority = evaluate.kernel.priority(device)
        run = evaluate.kernel.trace(device, priority, priority if best.in_turn else None)
        chain = critical_tasks(problem.core, device, run)
        if not chain:  # nothing but sources
            return
        for _ in range(8):
            if evaluate.is_over:
                break
            candidates = [
                _move_some(problem, best.groups, device, chain, rng, devices) for _ in range(width)
            ]
            incumbent.try_all(np.stack(candidates), best.priority, best.in_turn)
            if incumbent.best is not best:
                break
        stale = 0 if incumbent.best is not best else stale + 1


def _move_some(
    problem: Problem,
    groups: I32,
    device: I32,
    chain: list[int],
    rng: np.random.Generator,
    devices: list[int],
) -> I32:
    """Send a random run of the chain to the device of its neighbour in the chain, or to any."""
    tasks = problem.core.tasks
    moved = groups.copy()
    first = int(rng.integers(0, len(chain)))
    length = 1 + int(rng.geometric(0.3)) if rng.random() < 0.7 else 1
    run = chain[first : first + length]
    neighbours = chain[max(0, first - 1) : first + length + 1]
    around = [int(device[v]) for v in neighbours if device[v] != device[run[0]]]
    target = int(rng.choice(around)) if around and rng.random() < 0.7 else int(rng.choice(devices))
    for v in run:
        group = tasks.group[v]
        if problem.allowed[group, target]:
            moved[group] = target
    return moved


def improve_order(incumbent: Incumbent, rng: np.random.Generator, until: float, width: int) -> None:
    """Improve the order of the best placement.

    Each round takes the tails of the best schedule so far as priorities, as they are and with a
    little noise. Improves `incumbent.best`.
    """
    problem, evaluate = incumbent.problem, incumbent.evaluate
    tasks = problem.core.tasks
    device = problem.spaces.tasks_from_groups(incumbent.best.groups)
    base = incumbent.best.priority
    if base is None:
        base = evaluate.kernel.priority(device)
    static = evaluate.kernel.priority(device)
    stale = 0
    while stale < 12 and evaluate.meter.fraction_spent < until and not evaluate.is_over:
        best: BestPlacement = incumbent.best
        current = best.priority if best.priority is not None else base
        turn = current if best.in_turn else None
        tails = realised_tails(problem, device, evaluate.kernel.trace(device, current, turn))
        rows = [tails, (tails + static) // 2, (current + tails) // 2]
        noise = [0.002, 0.01, 0.03, 0.1]
        for k in range(max(1, width - len(rows))):
            factor = 1.0 + noise[k % len(noise)] * rng.standard_normal(tasks.num_tasks)
            rows.append((current * factor).astype(np.int64))
        priorities = np.stack(rows)
        incumbent.try_all(np.tile(best.groups, (len(rows), 1)), priorities)
        stale = 0 if incumbent.best is not best else stale + 1
