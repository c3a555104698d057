"""What a placer found, with the plan made of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from devplace.placers.objective import LATENCY, Latency, Objective
from devplace.placers.placer import Placer
from devplace.plan import Plan
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline
from devplace.simulator.bounds import LowerBound, Status, gap, status
from devplace.units import format_time


@dataclass(frozen=True, repr=False)
class Result:
    """What a placer found.

    Attributes:
        placement: Devices and priorities.
        timeline: Its simulation, done again after the placer ended.
        plan: The same as a plan that can be saved and run.
        placer: Name of the placer.
        seed: Seed it ran with.
        evaluations: Simulations it used.
        seconds: Wall-clock time it took, s.
        history: (evaluations, seconds, step_ns) at each improvement.
        bound: Lower bounds of the problem: of the step time, and memory.
        is_interrupted: Whether the placer was stopped by Ctrl-C; this is the best it had found.
        runners_up: The best other feasible placements it saw that differ in kind, fastest first.
        notes: What the user should know of the search.
        objective: What was to be small.
        least_ns: A value of the objective that the search proved no placement can beat; 0: none.
    """

    placement: Placement
    timeline: Timeline
    plan: Plan
    placer: str
    seed: int
    evaluations: int
    seconds: float
    history: tuple[tuple[int, float, int], ...]
    bound: LowerBound
    is_interrupted: bool = False
    runners_up: tuple[Placement, ...] = ()
    notes: tuple[str, ...] = ()
    objective: Objective = LATENCY
    least_ns: int = 0

    def __repr__(self) -> str:
        return (
            f"Result({self.placer}: {self.status}, step {format_time(self.step_ns)} predicted, "
            f"lower bound {format_time(self.bound.step_ns)}, {self.evaluations} evaluations in "
            f"{self.seconds:.1f} s, seed {self.seed})"
        )

    @property
    def step_ns(self) -> int:
        """Predicted step time."""
        return self.timeline.makespan_ns

    @cached_property
    def value_ns(self) -> int:
        """What was to be small."""
        return self.objective.value(self.timeline)

    @cached_property
    def bound_ns(self) -> int:
        """No placement that fits has a smaller value."""
        return self.least_ns or self.objective.bound(self.timeline.problem, self.bound)

    @property
    def has_own_value(self) -> bool:
        """Whether something else than the step time was to be small."""
        return not isinstance(self.objective, Latency)

    @property
    def is_feasible(self) -> bool:
        """Whether every memory limit holds."""
        return self.timeline.is_feasible

    @property
    def gap(self) -> float:
        """How far the value is above its lower bound: value / bound - 1."""
        return gap(self.value_ns, self.bound_ns)

    @property
    def status(self) -> Status:
        """`optimal`, `feasible`, `infeasible` (proved) or `unknown`: as `LowerBound.status`."""
        return status(self.value_ns, self.bound_ns, self.is_feasible, self.bound.is_infeasible)


def made_for(
    problem: Problem,
    placer: Placer,
    seed: int,
    request: dict[str, Any] | None,
    objective: Objective,
) -> dict[str, Any]:
    """The request of a plan: how it was made."""
    made: dict[str, Any] = {"placer": placer.name, "seed": seed, "limits": dict(problem.limits)}
    made |= {"pins": dict(problem.pins), "exclude": list(problem.exclude)}
    own = {} if isinstance(objective, Latency) else {"objective": objective.name}
    return {**made, **(request or {}), **own}
