"""Run a placer with clock, seed, budget and history, and check its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from devplace.errors import InputError, ProblemError, did_you_mean
from devplace.placers.budget import Budget
from devplace.placers.counted_simulator import Measure
from devplace.placers.infeasible import infeasible, no_room
from devplace.placers.margin_retry import search, with_priority
from devplace.placers.placer import Placer
from devplace.placers.result import Result, made_for
from devplace.placers.throughput_placing import place_throughput
from devplace.plan import make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.bounds import LowerBound, lower_bound

OBJECTIVES = ("latency", "throughput")


def place(
    problem: Problem,
    placer: Placer,
    budget: Budget | str | None = None,
    seed: int = 0,
    *,
    objective: str = "latency",
    request: dict[str, Any] | None = None,
    allow_infeasible: bool = False,
    bound: LowerBound | None = None,
    progress: Callable[[float], None] | None = None,
    measure: Measure | None = None,
) -> Result:
    """Place `problem` with `placer`.

    Args:
        problem: What is placed.
        placer: Who places it.
        budget: Budget, or text such as `30s` or `2000ev`; 30 s by default. Spent again, up to
            twice, where gaps between tensors make the found placement too large (`search`).
        seed: Seed of all randomness. The same seed and evaluations give the same plan.
        objective: `latency`, the time of one step, or `throughput`, the largest load of a device in
            a full pipeline of steps (see `devplace.pipelining.step_loads`). For `throughput` the
            result is a `ThroughputResult`, `search` is a solver of its own, whose evaluations are
            moves tried and placements simulated, and the placements of other placers are valued
            after their backward ops have gone to their forward ops.
        request: How the problem came about (model, machine ...), kept in the plan.
        allow_infeasible: Return the best placement even if it breaks a memory limit.
        bound: Lower bounds, if already known.
        progress: Called with the part of the budget spent so far, 0 to 1.
        measure: Runs a placement and gives its step time in ns, or None if it failed; the placer
            then learns from these times instead of simulated ones, and `history` holds them. The
            result's own step time is simulated in any case. If it has a method `many`, that gets
            all placements of an update at once, and gives a list.

    Ctrl-C ends the placer; if it had found something, that is returned.

    Raises:
        InfeasibleError: Nothing within the memory limits was found; says what is missing where.
        ProblemError: The placer does not support the problem.
        InputError: A budget that is not positive, or an unknown objective.
    """
    budget = Budget.parse(budget)
    if objective not in OBJECTIVES:
        raise InputError(
            f"Unknown objective {objective!r}.{did_you_mean(str(objective), OBJECTIVES)} "
            f"Known: {', '.join(OBJECTIVES)}."
        )
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"A seed must be a whole number from 0 to 2^63 - 1, got {seed!r}.")
    if isinstance(placer, (str, type)) or not callable(placer):
        raise InputError(
            f"A placer must be an instance such as placers.Search(), got {placer!r}. "
            f"placers.by_name('search') gives one by name."
        )
    reason = placer.supports(problem)
    if reason:
        raise ProblemError(f"Placer {placer.name} cannot place this: {reason}. Choose another one.")
    bound = bound or lower_bound(problem)
    if bound.is_infeasible and not allow_infeasible:
        raise no_room(problem, bound)
    if objective == "throughput":
        if measure is not None:
            raise InputError(
                "A measurement times one step and cannot stand for the largest load: leave out "
                "measure, or use objective='latency'."
            )
        return place_throughput(
            problem, placer, budget, seed, bound, request, allow_infeasible, progress
        )
    found = search(problem, placer, budget, seed, progress, measure, bound.step_ns)
    placement, timeline = found.placement, found.timeline
    if measure is None and timeline.is_feasible:
        placement, timeline = leanest(placement, timeline, found.runners_up)
    bound = replace(bound, proved_ns=max(bound.proved_ns, found.proved_ns))
    if found.is_infeasible and not bound.lack:
        bound = replace(bound, lack="exact")
    if not timeline.is_feasible and not allow_infeasible:
        raise infeasible(timeline, placer.name, bound)
    made = made_for(problem, placer, seed, request)
    plan = make_plan(timeline, placement.priority, made, bound.step_ns)
    return Result(
        placement,
        timeline,
        plan,
        placer.name,
        seed,
        found.evaluations,
        found.seconds,
        found.history,
        bound,
        found.is_interrupted,
        found.runners_up,
        found.notes,
    )


def leanest(
    placement: Placement, timeline: Timeline, others: Iterable[Placement]
) -> tuple[Placement, Timeline]:
    """Of a placement and others that are as fast, fit and use no more devices, the one whose
    fullest device holds least; of equal ones the first."""
    best = placement, timeline
    used = np.count_nonzero(timeline.peak_bytes)
    for other in others:
        step = simulate(timeline.problem, other)
        is_equal = step.is_feasible and step.makespan_ns == timeline.makespan_ns
        is_leaner = step.peak_bytes.max() < best[1].peak_bytes.max()
        if is_equal and is_leaner and np.count_nonzero(step.peak_bytes) <= used:
            best = with_priority(timeline.problem, other), step
    return best
