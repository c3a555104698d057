"""The solvers for each kind of instance, by the names that `--placer` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from devplace import placers
from devplace.bench import simple
from devplace.bench.answer import Answer, Blocks, OrderedPlacement, Split, Stages, Status
from devplace.bench.as_problems import (
    Rounded,
    block_problem,
    dataflow_problem,
    replicated_problem,
    round_load,
    rounded_off,
    tensor_stage_problem,
)
from devplace.errors import InputError, did_you_mean
from devplace.instances import Instance
from devplace.instances.records import (
    DataflowInstance,
    LoadInstance,
    PipelineInstance,
    VariantInstance,
)
from devplace.pipelining import LoadSolution, solve, solve_contiguous
from devplace.pipelining.block_latency import pieces
from devplace.pipelining.replicated import solve_replicated
from devplace.pipelining.solve_latency import solve_latency
from devplace.pipelining.tensor_stages import solve_tensor_stages
from devplace.placers import Budget
from devplace.problem import Problem
from devplace.simulator.bounds import lower_bound
from devplace.verify import Stage

DEFAULT = "search"
MAX_THREADS = 1024
_STATUS: dict[str, Status] = {
    "optimal": "optimal",
    "feasible": "feasible",
    "infeasible": "infeasible",
    "unknown": "unknown",
}


@dataclass(frozen=True)
class Effort:
    """What a solver may spend.

    Attributes:
        budget: Seconds, and simulations where the solver counts them.
        seed: Of all randomness.
        threads: Threads, at most.

    Raises:
        InputError: A seed or a number of threads out of range.
    """

    budget: Budget
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= MAX_THREADS:
            raise InputError(
                f"A search takes from 1 to {MAX_THREADS} threads, got {self.threads}. Give as "
                f"many as there are cores."
            )
        if not 0 <= self.seed < 2**31:
            raise InputError(f"A seed must be from 0 to 2^31 - 1, got {self.seed}.")

    @property
    def seconds(self) -> float | None:
        """Wall-clock time, s; None where only moves are counted."""
        return None if self.is_counted else self.seconds_or_default

    @property
    def seconds_or_default(self) -> float:
        """Wall-clock time for what counts no moves, s."""
        return self.budget.seconds or placers.budget.DEFAULT_SECONDS

    @property
    def is_counted(self) -> bool:
        """Whether the answer shall depend on the seed alone, not on the clock."""
        return self.budget.seconds is None and self.budget.evaluations is not None


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
        names = [*(placer().name for placer in placers.PLAIN), *placers.LEARNING]
        return {name: _placer(name) for name in names}
    if isinstance(instance, LoadInstance):
        simple_ones: dict[str, Solver] = {
            "single": lambda instance, effort: simple.single(instance),
            "greedy": lambda instance, effort: simple.greedy(instance),
            "expert": lambda instance, effort: simple.expert(instance),
        }
        if instance.objective == "latency":
            return {"search": _latency, **simple_ones}
        return {"search": _largest_load, "contiguous": _contiguous, **simple_ones}
    if isinstance(instance, PipelineInstance):
        return {"search": _replicated}
    return {"search": _tensor_stages}


def _largest_load(instance: LoadInstance, effort: Effort) -> Answer:
    """devplace's own search, with bounds and CP-SAT where it is installed."""
    rounded = round_load(instance)
    found = solve(
        rounded.problem,
        effort.seconds,
        effort.seed,
        1 if effort.is_counted else effort.threads,
        max_evaluations=effort.budget.evaluations,
        exact=not effort.is_counted,
    )
    return _split(instance, rounded, found, _STATUS[found.status], found.bound_ps)


def _contiguous(instance: LoadInstance, effort: Effort) -> Answer:
    """Best contiguous split (the dynamic programme of Tarnawski et al.); `optimal` there is no
    proof for splits of other kinds."""
    rounded = round_load(instance)
    found = solve_contiguous(rounded.problem, effort.seconds or 86_400.0)
    status: Status = "unknown" if found.device is None else "feasible"
    return _split(instance, rounded, found, status, None)


def _latency(instance: LoadInstance, effort: Effort) -> Answer:
    """devplace's own search over blocks."""
    rounded = round_load(instance)
    problem = block_problem(rounded.problem)
    found = solve_latency(
        problem,
        effort.seconds,
        effort.seed,
        1 if effort.is_counted else effort.threads,
        max_evaluations=effort.budget.evaluations,
    )
    answer = _split(instance, rounded, found, _STATUS[found.status], found.bound_ps)
    if not isinstance(answer.solution, Split) or found.device is None:
        return answer
    k, piece = problem.num_accelerators, pieces(problem, found.device).tolist()
    block = tuple(int(d) + k * p if d < k else -1 for d, p in zip(found.device, piece, strict=True))
    return replace(answer, solution=Blocks(answer.solution.device, block))


def _replicated(instance: PipelineInstance, effort: Effort) -> Answer:
    """PipeDream's dynamic programme, over all places to cut."""
    problem, unit = replicated_problem(instance)
    found = solve_replicated(problem, seconds=effort.seconds_or_default)
    stages = tuple(
        Stage(tuple(np.flatnonzero(found.stage == s).tolist()), int(count))
        for s, count in enumerate(found.replicas)
    )
    bound, value = float(found.bound_ps * unit), float(found.value_ps * unit)
    return Answer(Stages(stages), _STATUS[found.status], bound, value)


def _tensor_stages(instance: VariantInstance, effort: Effort) -> Answer:
    """Piper's dynamic programme, searched by bisection."""
    problem, unit = tensor_stage_problem(instance)
    found = solve_tensor_stages(problem, seconds=effort.seconds_or_default)
    status = _STATUS[found.status]
    if found.stages is None or found.value_s is None:
        return Answer(None, status, None, why="no stages fit the memory")
    stages = tuple(
        Stage(stage.nodes, stage.data_degree, stage.tensor_degree, stage.variant)
        for stage in found.stages
    )
    return Answer(Stages(stages), status, found.bound_s * unit, found.value_s * unit)


def _split(
    instance: LoadInstance,
    rounded: Rounded,
    found: LoadSolution,
    status: Status,
    bound_ps: int | None,
) -> Answer:
    """What was found for the rounded problem, told of the instance: only what is sure of it."""
    bound = None if bound_ps is None else float(Fraction(bound_ps, rounded.per_ms))
    why = found.how
    if not rounded.is_exact:
        bound = None
        status = "feasible" if status == "optimal" else status
        if status == "infeasible" and not rounded.never_fits:
            status, why = "unknown", "its numbers are too far apart for a proof"
    if status == "infeasible" and not rounded.in_bytes:
        why = "the nodes do not fit the memory of the accelerators, and there is no CPU for them"
    if found.device is None or found.value_ps is None:
        return Answer(None, status, bound if status == "unknown" else None, why=why)
    device = rounded.device(instance, found.device.tolist())
    return Answer(Split(device), status, bound, float(Fraction(found.value_ps, rounded.per_ms)))


def _placer(name: str) -> Solver:
    """One of devplace's placers on a dataflow graph."""

    def run(instance: DataflowInstance, effort: Effort) -> Answer:
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
        order += ((),) * (instance.num_devices - len(order))
        if result.is_interrupted:
            raise KeyboardInterrupt
        least = max(result.bound.step_ns, _exact_bound(problem))
        value, lost = result.step_ns * unit, rounded_off(instance, unit)
        if lost > Fraction(value) / 10**9:  # its numbers are too far apart
            sure = float(max(Fraction(0), least * unit - lost))
            return Answer(OrderedPlacement(tuple(device), order), "feasible", sure)
        return Answer(
            OrderedPlacement(tuple(device), order),
            "optimal" if result.step_ns <= least else "feasible",
            float(least * unit),
            float(value),
        )

    return run


def _exact_bound(problem: Problem) -> int:
    """Work shared out perfectly, in whole numbers: the general bound is a hair lower."""
    work = int(problem.costs.compute_ns[:, 0].sum())
    return -(-work // len(problem.machine.devices))
