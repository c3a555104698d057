"""Plans worth running: the best few of a search that differ, and the trivial ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from devplace.placers import Result
from devplace.placers.groups import accelerators
from devplace.placers.modules import module_chain
from devplace.placers.rounds import with_priority
from devplace.placers.simple.even import even_split
from devplace.placers.simple.single import all_on
from devplace.plan import Plan, make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import simulate


@dataclass(frozen=True)
class Candidate:
    """A plan to run.

    Attributes:
        name: What it is called in tables.
        plan: The plan.
        is_single: Whether everything that may be is on one device.
    """

    name: str
    plan: Plan = field(repr=False)
    is_single: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that run ops."""
        plan = self.plan
        return tuple(name for name, row in zip(plan.device_names, plan.order, strict=True) if row)


def candidates(result: Result, most_runners_up: int = 4) -> list[Candidate]:
    """What to run to confirm a result, the most telling first.

    Best single device; the result; other single devices of another kind; the even split; then
    runners-up of the search. Only what fits, and nothing twice.

    Args:
        result: Of `place`.
        most_runners_up: Runners-up at most.
    """
    problem = result.timeline.problem
    request = result.plan.request
    found = singles(problem, request)
    found.insert(min(1, len(found)), Candidate(result.placer, result.plan))
    fast = accelerators(problem)
    if len(fast) > 1 and problem.core.tasks.num_groups:
        split = even_split(problem, module_chain(problem), fast)
        found += _fitting(problem, split, "even split", request)
    for number, placement in enumerate(result.runners_up[:most_runners_up], start=1):
        found += _fitting(problem, placement, f"runner-up {number}", request)
    return _distinct(found)


def singles(problem: Problem, request: dict[str, Any]) -> list[Candidate]:
    """Each single device that fits, fastest predicted first; of equal devices only the first."""
    found: dict[Any, Candidate] = {}
    for index in problem.usable_devices:
        device = problem.machine.devices[index]
        kind = (device.kind, device.model, device.memory_bytes)
        if kind in found:
            continue
        placement = all_on(problem, index)
        alone = bool((placement.devices == index).all())
        name = f"{device.name} {'alone' if alone else 'where allowed'}"
        for candidate in _fitting(problem, placement, name, request):
            found[kind] = Candidate(name, candidate.plan, is_single=True)
    return sorted(found.values(), key=lambda candidate: candidate.plan.predicted.step_ns)


def _fitting(
    problem: Problem, placement: Placement, name: str, request: dict[str, Any]
) -> list[Candidate]:
    placement = with_priority(problem, placement)
    timeline = simulate(problem, placement)
    if not timeline.is_feasible:
        return []
    made = {**request, "placer": name}
    return [Candidate(name, make_plan(timeline, placement.priority, made))]


def _distinct(found: list[Candidate]) -> list[Candidate]:
    seen: set[Any] = set()
    kept = []
    for candidate in found:
        key = (candidate.plan.placement, candidate.plan.order)
        if key not in seen:
            seen.add(key)
            kept.append(candidate)
    return kept
