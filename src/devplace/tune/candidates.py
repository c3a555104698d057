"""Plans worth running: the best distinct ones of a search, and the trivial ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from devplace.placers import Result
from devplace.placers.margin_retry import with_priority
from devplace.placers.modules import module_chain
from devplace.placers.orders import has_micro_batches, in_trace_order
from devplace.placers.simple.even import even_split
from devplace.placers.simple.single import all_on
from devplace.plan import Plan, make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.in_order import simulate_in_order


@dataclass(frozen=True)
class Candidate:
    """A plan to run.

    Attributes:
        name: What it is called in tables.
        plan: The plan.
        predicted_ns: Its step time with what the caches hold in its order.
        is_single: Whether everything that may be is on one device.
    """

    name: str
    plan: Plan = field(repr=False)
    predicted_ns: int
    is_single: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that run ops."""
        plan = self.plan
        return tuple(name for name, row in zip(plan.device_names, plan.order, strict=True) if row)

    @property
    def problem(self) -> Problem:
        """What the plan was made for."""
        assert self.plan.problem is not None, "the plan is from a file"
        return self.plan.problem


def of_searches(results: Sequence[Result]) -> list[Candidate]:
    """What to run of searches of one step, as with several numbers of micro-batches: the best
    single device, every search's best by prediction, then the others."""
    alone: list[Candidate] = []
    bests: list[Candidate] = []
    others: list[Candidate] = []
    for number, result in enumerate(results):
        count = result.timeline.problem.graph.meta.get("micro_batches", 1)
        prefix = f"{count} micro-batches, " if count > 1 and len(results) > 1 else ""
        for found in candidates(result) if number == 0 else candidates(result, 0):
            candidate = replace(found, name=prefix + found.name)
            if not candidate.is_single:
                (bests if candidate.plan is result.plan else others).append(candidate)
            elif number == 0 or not alone:
                alone.append(candidate)
    bests.sort(key=_predicted)
    others.sort(key=_predicted)
    return [*alone[:1], *bests, *alone[1:], *others]


def candidates(result: Result, most_runners_up: int = 4) -> list[Candidate]:
    """What to run to confirm a result, the most telling first.

    Best single device; the result; its micro-batches in turn, where that is predicted to be faster;
    other single devices of another kind; the even split; then runners-up of the search. Only what
    fits, and nothing twice.

    Args:
        result: Of `place`.
        most_runners_up: Runners-up at most.
    """
    problem = result.timeline.problem
    request = result.plan.request
    found = singles(problem, request)
    planned = [_candidate(problem, result.placer, result.plan)]
    if has_micro_batches(problem):
        in_turn = in_trace_order(problem, result.placement)
        others = _fitting(problem, in_turn, f"{result.placer}, in turn", request)
        planned += [other for other in others if other.predicted_ns < planned[0].predicted_ns]
    found[1:1] = planned
    fast = problem.accelerators
    if len(fast) > 1 and problem.core.tasks.num_groups:
        split = even_split(problem, module_chain(problem), fast)
        found += _fitting(problem, split, "even split", request)
    for number, placement in enumerate(result.runners_up[:most_runners_up], start=1):
        found += _fitting(problem, placement, f"runner-up {number}", request)
    return _distinct(found)


def singles(problem: Problem, request: dict[str, Any]) -> list[Candidate]:
    """Each single device that fits, fastest predicted first; of equal devices only the first.

    Where times depend on the order, that of the trace is weighed against critical paths.
    """
    found: dict[Any, Candidate] = {}
    for index in problem.usable_devices:
        device = problem.machine.devices[index]
        kind = (device.kind, device.model, device.memory_bytes)
        if kind in found:
            continue
        placement = all_on(problem, index)
        alone = bool((placement.devices == index).all())
        name = f"{device.name} {'alone' if alone else 'where allowed'}"
        orders = [placement]
        if problem.costs.caching is not None:
            orders.append(in_trace_order(problem, placement))
        fitting = [one for order in orders for one in _fitting(problem, order, name, request)]
        if fitting:
            best = min(fitting, key=_predicted)
            found[kind] = replace(best, is_single=True)
    return sorted(found.values(), key=_predicted)


def _predicted(candidate: Candidate) -> int:
    return candidate.predicted_ns


def _fitting(
    problem: Problem, placement: Placement, name: str, request: dict[str, Any]
) -> list[Candidate]:
    placement = with_priority(problem, placement)
    timeline = simulate(problem, placement)
    if not timeline.is_feasible:
        return []
    made = {**request, "placer": name}
    return [_candidate(problem, name, make_plan(timeline, placement.priority, made))]


def _candidate(problem: Problem, name: str, plan: Plan) -> Candidate:
    return Candidate(name, plan, predicted_ns(problem, plan))


def predicted_ns(problem: Problem, plan: Plan) -> int:
    """Step time of a plan with what the caches hold in its order, as far as costs know that."""
    costs = problem.costs.in_order(problem.graph, plan.order)
    if costs is problem.costs:
        return plan.predicted.step_ns
    placement = Placement(np.array(plan.placement, np.int32))
    return simulate_in_order(replace(problem, costs=costs), placement, plan.order).makespan_ns


def _distinct(found: list[Candidate]) -> list[Candidate]:
    seen: set[Any] = set()
    kept = []
    for candidate in found:
        key = (candidate.plan.placement, candidate.plan.order)
        if key not in seen:
            seen.add(key)
            kept.append(candidate)
    return kept
