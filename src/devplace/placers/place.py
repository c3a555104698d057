"""Run a placer with clock, seed, budget and history, and check its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from devplace.errors import InputError, ProblemError, did_you_mean
from devplace.placers.budget import Budget
from devplace.placers.counted_simulator import Measure
from devplace.placers.infeasible import infeasible, no_room
from devplace.placers.objective import LATENCY, Objective
from devplace.placers.placer import Placer
from devplace.placers.ray_workers import RayWorkers
from devplace.placers.result import Result, made_for
from devplace.placers.throughput_placing import Throughput
from devplace.plan import make_plan
from devplace.problem import Problem
from devplace.simulator.bounds import LowerBound, lower_bound

OBJECTIVES: dict[str, Objective] = {each.name: each for each in (LATENCY, Throughput())}


def place(
    problem: Problem,
    placer: Placer,
    budget: Budget | str | None = None,
    seed: int = 0,
    *,
    objective: str | Objective = "latency",
    request: dict[str, Any] | None = None,
    allow_infeasible: bool = False,
    bound: LowerBound | None = None,
    progress: Callable[[float], None] | None = None,
    measure: Measure | None = None,
    workers: RayWorkers | None = None,
) -> Result:
    """Place `problem` with `placer`.

    Args:
        problem: What is placed.
        placer: Who places it.
        budget: Budget, or text such as `30s` or `2000ev`; 30 s by default. Spent again, up to
            twice, where gaps between tensors make the found placement too large (`search`).
        seed: Seed of all randomness. The same seed and evaluations give the same plan.
        objective: `latency`, the time of one step, or `throughput`, the largest load of a device in
            a full pipeline of steps (see `devplace.pipelining.step_loads`); or one of your own
            (`Objective`). For `throughput`, `search` is a solver of its own, whose evaluations are
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
        workers: Searches side by side, of which the best counts; here by default.

    Ctrl-C ends the placer; if it had found something, that is returned.

    Raises:
        InfeasibleError: Nothing within the memory limits was found; says what is missing where.
        ProblemError: The placer does not support the problem.
        InputError: A budget that is not positive, or an unknown objective.
    """
    budget = Budget.parse(budget)
    goal = OBJECTIVES.get(objective) if isinstance(objective, str) else objective
    if goal is None:
        raise InputError(
            f"Unknown objective {objective!r}.{did_you_mean(str(objective), tuple(OBJECTIVES))} "
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
    reason = goal.refuses(problem, measure is not None)
    if reason:
        raise InputError(reason)
    bound = bound or lower_bound(problem)
    if bound.is_infeasible and not allow_infeasible:
        raise no_room(problem, bound)
    if workers is None:
        found = goal.search(problem, placer, budget, seed, progress, measure, bound)
    elif measure is None:
        found = workers.search(goal, problem, placer, budget, seed, bound)
        request = {**(request or {}), "workers": workers.count}
    else:
        raise InputError("measure runs steps in this process: leave it out, or workers.")
    placement, timeline = found.placement, found.timeline
    bound = replace(bound, proved_ns=max(bound.proved_ns, found.proved_ns))
    if found.is_infeasible and not bound.lack:
        bound = replace(bound, lack="exact")
    if not timeline.is_feasible and not allow_infeasible:
        raise infeasible(timeline, placer.name, bound)
    made = made_for(problem, placer, seed, request, goal)
    kept = {goal.predicted_as: goal.value(timeline)} if goal.predicted_as else {}
    return Result(
        placement,
        timeline,
        make_plan(timeline, placement.priority, made, bound.step_ns, **kept),
        placer.name,
        seed,
        found.evaluations,
        found.seconds,
        found.history,
        bound,
        found.is_interrupted,
        found.runners_up,
        found.notes,
        goal,
        found.least_ns,
    )
