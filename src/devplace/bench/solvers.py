"""Which solvers there are for each kind of instance, by the names `--placer` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from devplace import placers
from devplace.bench import simple
from devplace.bench.answer import Answer, Schedule
from devplace.bench.convert import dataflow_problem
from devplace.errors import InputError, did_you_mean
from devplace.instances import Instance
from devplace.instances.records import DataflowInstance, LoadInstance
from devplace.placers import Budget
from devplace.simulator.bounds import lower_bound

DEFAULT = "search"


@dataclass(frozen=True)
class Effort:
    """What a solver may spend.

    Attributes:
        budget: Seconds, and simulations where the solver counts them.
        seed: Of all randomness.
        threads: Threads, at most.
    """

    budget: Budget
    seed: int = 0
    threads: int = 2

    @property
    def seconds(self) -> float:
        """Wall-clock time, s."""
        return self.budget.seconds or placers.budget.DEFAULT_SECONDS


Solver = Callable[[Any, Effort], Answer]


def solver(instance: Instance, name: str) -> Solver:
    """The solver of that name for an instance.

    Raises:
        InputError: There is none; says which there are.
    """
    known = solvers_of(instance)
    if name not in known:
        raise InputError(
            f"Placer {name!r} does not solve {instance.about.name} (objective "
            f"{instance.objective}).{did_you_mean(name, known)} Known for it: {', '.join(known)}."
        )
    return known[name]


def solvers_of(instance: Instance) -> dict[str, Solver]:
    """Solvers by name."""
    if isinstance(instance, DataflowInstance):
        return {placer().name: _placer(placer().name) for placer in placers.ALL}
    if isinstance(instance, LoadInstance):
        return {
            "search": lambda instance, effort: simple.greedy(instance),
            "single": lambda instance, effort: simple.single(instance),
            "greedy": lambda instance, effort: simple.greedy(instance),
            "expert": lambda instance, effort: simple.expert(instance),
        }
    return {"search": lambda instance, effort: Answer(None, "unknown")}


def _placer(name: str) -> Solver:
    """One of devplace's placers on a dataflow graph."""

    def solve(instance: DataflowInstance, effort: Effort) -> Answer:
        problem, unit = dataflow_problem(instance)
        placer = placers.by_name(name)
        reason = placer.supports(problem)
        if reason:
            return Answer(None, "unknown", why=reason)
        bound = lower_bound(problem)
        result = placers.place(problem, placer, effort.budget, effort.seed, bound=bound)
        ops = problem.graph.ops
        device = [0] * len(ops)
        for op, d in zip(ops, result.plan.placement, strict=True):
            device[int(op.name)] = d
        order = tuple(tuple(int(ops[v].name) for v in row) for row in result.plan.order)
        is_optimal = result.step_ns <= bound.step_ns
        return Answer(
            Schedule(tuple(device), order),
            "optimal" if is_optimal else "feasible",
            float(bound.step_ns * unit),
            float(result.step_ns * unit),
        )

    return solve
