"""What a placer found, with the plan made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from devplace.placers.placer import Placer
from devplace.plan import Plan
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline
from devplace.simulator.bounds import LowerBound, Status


@dataclass(frozen=True)
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
        bound: Lower bounds of the problem.
        is_interrupted: Whether the placer was stopped by Ctrl-C; this is the best it had found.
        runners_up: The best other feasible placements it saw that differ in kind, fastest first.
        notes: What the user should know of the search.
    """

    placement: Placement = field(repr=False)
    timeline: Timeline = field(repr=False)
    plan: Plan = field(repr=False)
    placer: str
    seed: int
    evaluations: int
    seconds: float
    history: tuple[tuple[int, float, int], ...] = field(repr=False)
    bound: LowerBound
    is_interrupted: bool = False
    runners_up: tuple[Placement, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def step_ns(self) -> int:
        """Predicted step time."""
        return self.timeline.makespan_ns

    @property
    def objective(self) -> str:
        """What was to be small: `latency` (one step) or `throughput` (largest load)."""
        return "latency"

    @property
    def value_ns(self) -> int:
        """What was to be small: the predicted step time."""
        return self.step_ns

    @property
    def is_feasible(self) -> bool:
        """Whether every memory limit holds."""
        return self.timeline.is_feasible

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound: step / bound - 1."""
        return self.bound.gap(self.step_ns)

    @property
    def status(self) -> Status:
        """`optimal`, `feasible`, `infeasible` (proved) or `unknown`: `LowerBound.status`."""
        return self.bound.status(self.step_ns, self.is_feasible)


def made_for(
    problem: Problem, placer: Placer, seed: int, request: dict[str, Any] | None
) -> dict[str, Any]:
    """The request of a plan: how it was made."""
    made: dict[str, Any] = {"placer": placer.name, "seed": seed, "limits": dict(problem.limits)}
    made |= {"pins": dict(problem.pins), "exclude": list(problem.exclude)}
    return {**made, **(request or {})}
