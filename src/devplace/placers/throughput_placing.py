"""Place for pipeline throughput: minimize the largest load of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
from devplace.placers.budget import Budget, Meter
from devplace.placers.counted_simulator import Evaluator, Measure
from devplace.placers.local_search.search import Search
from devplace.placers.margin_retry import Found
from devplace.placers.objective import Objective
from devplace.placers.partitioners.mincut import MinCut
from devplace.placers.partitioners.pipedream import PipeDream
from devplace.placers.placer import Placer
from devplace.placers.simple.even import Even
from devplace.placers.simple.greedy import Greedy
from devplace.placers.simple.layers import Layers
from devplace.placers.simple.single import Single
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.bounds import LowerBound

I32 = NDArray[np.int32]

# Single last: the solver tries single devices itself, and of many they take long.
_STARTS: tuple[Placer, ...] = (PipeDream(), Even(), Layers(), Greedy(), MinCut(), Single())
_STARTS_PART = 0.3  # of the time, after which no further one is made
_STARTS_SHARE = 10  # one evaluation in so many is theirs, at most


class Throughput(Objective):
    """The largest load of a device: what it does in each period of a full pipeline of steps."""

    name, label, predicted_as = "throughput", "max load", "max_load_ns"

    def value(self, timeline: Timeline) -> int:
        """Time per step when steps of many batches overlap."""
        return int(step_loads(timeline.problem, timeline.task_devices).max())

    def bound(self, problem: Problem, known: LowerBound) -> int:
        """`load_bound`."""
        return load_bound(problem, load_ns=known.load_ns)

    def search(
        self,
        problem: Problem,
        placer: Placer,
        budget: Budget,
        seed: int,
        progress: Callable[[float], None] | None,
        measure: Measure | None,
        bound: LowerBound,
    ) -> Found:
        """`search` is the solver of `devplace.pipelining`. Any other placer works as ever; then
        backward ops go to their forward ops, as the objective has it."""
        solved: StepLoadSolution | Found
        if isinstance(placer, Search):
            solved = _solved(problem, placer, budget, seed, progress, bound.load_ns)
            device, least_ns = solved.device, solved.bound_ns
        else:
            solved = margin_retry.search(problem, placer, budget, seed, progress)
            device, least_ns = together(problem, problem.task_devices(solved.placement)), 0
        placement = margin_retry.with_priority(
            problem, Placement(problem.spaces.op_devices(device))
        )
        timeline = simulate(problem, placement)
        return Found(
            placement,
            timeline,
            solved.evaluations,
            solved.seconds,
            ((solved.evaluations, solved.seconds, timeline.makespan_ns),),
            (),
            solved.is_interrupted,
            solved.notes,
            least_ns=least_ns,
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
    meter = Meter(budget)
    hints = _hints(problem, meter, seed)
    seconds, most, tried = budget.seconds, budget.evaluations, meter.num_evaluations
    if seconds is not None:
        seconds = max(0.05, seconds - meter.seconds)
    if most is not None:
        most -= tried
    start = None if placer.start is None else problem.task_devices(placer.start)
    effort = SolverEffort(seconds, most, seed, num_cores())
    found = place_step(problem, effort, hints, progress, load_ns, start)
    return replace(found, seconds=meter.seconds, evaluations=found.evaluations + tried)


def _hints(problem: Problem, meter: Meter, seed: int) -> list[I32]:
    """Placements of tasks by the quick placers."""
    seconds, most = meter.budget.seconds, meter.budget.evaluations
    part = None if most is None else max(1, most // _STARTS_SHARE)
    evaluate = Evaluator(problem, Budget(evaluations=part))
    hints: list[I32] = []
    for start in _STARTS if most != 1 else ():  # the one is for the answer
        if seconds is not None and meter.seconds > _STARTS_PART * seconds:
            break
        if not start.supports(problem):
            rng = np.random.default_rng(seed)
            hints.append(problem.task_devices(start(problem, evaluate, rng)))
    meter.count(evaluate.meter.num_evaluations)
    return hints
