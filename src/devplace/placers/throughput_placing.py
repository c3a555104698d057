"""Place for pipeline throughput: minimize the largest load of a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from devplace.machine.detect import num_cores
from devplace.pipelining import (
    SolverEffort,
    StepLoadSolution,
    load_bound,
    place_step,
    step_loads,
    together,
)
from devplace.placers import margin_retry
from devplace.placers.budget import Budget
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.infeasible import infeasible
from devplace.placers.local_search.search import Search
from devplace.placers.partitioners.mincut import MinCut
from devplace.placers.partitioners.pipedream import PipeDream
from devplace.placers.placer import Placer
from devplace.placers.result import Result, made_for
from devplace.placers.simple.even import Even
from devplace.placers.simple.greedy import Greedy
from devplace.placers.simple.layers import Layers
from devplace.placers.simple.single import Single
from devplace.plan import make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.bounds import LowerBound

I32 = NDArray[np.int32]

# Single last: the solver tries single devices itself, and of many they take long.
_STARTS: tuple[Placer, ...] = (PipeDream(), Even(), Layers(), Greedy(), MinCut(), Single())
_STARTS_PART = 0.3  # of the time, after which no further one is made
_STARTS_SHARE = 10  # one evaluation in so many is theirs, at most


@dataclass(frozen=True)
class ThroughputResult(Result):
    """What was found for a full pipeline. `step_ns` is one step alone, as devplace runs it.

    Attributes:
        loads_ns: Load of each device: what it does in each period of the full pipeline.
        load_bound_ns: No placement has a smaller largest load.
        how: What gave the placement.
    """

    loads_ns: tuple[int, ...] = ()
    load_bound_ns: int = 0
    how: str = field(default="", repr=False)

    @property
    def objective(self) -> str:
        """`throughput`."""
        return "throughput"

    @property
    def value_ns(self) -> int:
        """The largest load: time per step when steps of many batches overlap."""
        return max(self.loads_ns)

    @property
    def gap(self) -> float:
        """How far the largest load is above its lower bound: load / bound - 1."""
        return self.value_ns / self.load_bound_ns - 1 if self.load_bound_ns else 0.0

    @property
    def status(self) -> Literal["optimal", "feasible", "infeasible", "unknown"]:
        """`optimal` where the largest load equals its bound, `feasible` where memory holds, else
        `infeasible` if that is proved, or `unknown`."""
        if not self.is_feasible:
            return "infeasible" if self.bound.is_infeasible else "unknown"
        return "optimal" if self.value_ns <= self.load_bound_ns else "feasible"


def place_throughput(
    problem: Problem,
    placer: Placer,
    budget: Budget,
    seed: int,
    bound: LowerBound,
    request: dict[str, Any] | None,
    allow_infeasible: bool,
    progress: Callable[[float], None] | None,
) -> ThroughputResult:
    """`place` with `objective="throughput"`: see there.

    `search` is the solver of `devplace.pipelining`. Any other placer works as ever; then backward
    ops go to their forward ops, as the objective has it.
    """
    if isinstance(placer, Search):
        found = _solved(problem, placer, budget, seed, progress, bound.load_ns)
    else:
        found = _by_placer(problem, placer, budget, seed, progress, bound.load_ns)
    placement = margin_retry.with_priority(problem, Placement(problem.expand(found.device)))
    timeline = simulate(problem, placement)
    if not timeline.is_feasible and not allow_infeasible:
        raise infeasible(timeline, placer.name, bound)
    made = made_for(problem, placer, seed, request) | {"objective": "throughput"}
    loads = tuple(int(x) for x in found.loads_ns)
    plan = make_plan(timeline, placement.priority, made, bound.step_ns, max_load_ns=max(loads))
    return ThroughputResult(
        placement,
        timeline,
        plan,
        placer.name,
        seed,
        found.evaluations,
        found.seconds,
        ((found.evaluations, found.seconds, timeline.makespan_ns),),
        bound,
        found.is_interrupted,
        notes=found.notes,
        loads_ns=loads,
        load_bound_ns=found.bound_ns,
        how=found.how,
    )


def _solved(
    problem: Problem,
    placer: Search,
    budget: Budget,
    seed: int,
    progress: Callable[[float], None] | None,
    load_ns: int,
) -> StepLoadSolution:
    """From the quick placers' placements, and from the one the search was told to start from."""
    began, seconds, most = time.monotonic(), budget.seconds, budget.evaluations
    hints, tried = _hints(problem, budget, seed)
    spent = time.monotonic() - began
    if seconds is not None:
        seconds = max(0.05, seconds - spent)
    if most is not None:
        most -= tried
    start = None if placer.start is None else problem.task_devices(placer.start)
    effort = SolverEffort(seconds, most, seed, num_cores())
    found = place_step(problem, effort, hints, progress, load_ns, start)
    return replace(found, seconds=found.seconds + spent, evaluations=found.evaluations + tried)


def _hints(problem: Problem, budget: Budget, seed: int) -> tuple[list[I32], int]:
    """Placements of tasks by the quick placers, and the simulations that they took."""
    began, most = time.monotonic(), budget.evaluations
    part = None if most is None else max(1, most // _STARTS_SHARE)
    evaluate = Evaluator(problem, Budget(evaluations=part))
    hints: list[I32] = []
    for start in _STARTS if most != 1 else ():  # the one is for the answer
        late = budget.seconds is not None and (
            time.monotonic() - began > _STARTS_PART * budget.seconds
        )
        if late:
            break
        if not start.supports(problem):
            rng = np.random.default_rng(seed)
            hints.append(problem.task_devices(start(problem, evaluate, rng)))
    return hints, evaluate.num_evaluations


def _by_placer(
    problem: Problem,
    placer: Placer,
    budget: Budget,
    seed: int,
    progress: Callable[[float], None] | None,
    load_ns: int,
) -> StepLoadSolution:
    found = margin_retry.search(problem, placer, budget, seed, progress)
    device = together(problem, problem.task_devices(found.placement))
    return StepLoadSolution(
        device,
        step_loads(problem, device),
        0,
        load_bound(problem, load_ns=load_ns),
        placer.name,
        found.evaluations,
        found.seconds,
        found.is_interrupted,
        found.notes,
    )
