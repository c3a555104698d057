"""Placement, order, transfers and memory by constraint programming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.graph.coarsen import coarsen, max_depth
from devplace.pipelining.cp_sat import cp_model, solve
from devplace.placers.colocation_groups import mean_duration_ns
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.exact.model import Space, StepModel
from devplace.placers.exact.size import MAX_CONSTRAINTS, ModelSizeError, num_constraints
from devplace.placers.extras import missing
from devplace.placers.local_search.classes import make_classes
from devplace.placers.local_search.search import Search
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.bounds import lower_bound
from devplace.simulator.memory_bounds import least_needs

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# What one evaluation of the budget counts for in CP-SAT's own deterministic time.
DETERMINISTIC_PER_EVALUATION = 0.001
# Constraints that are put into a model in a second (a core of a server CPU), and the part of the
# time left that building may take: what remains is for CP-SAT, which reads them four times as fast.
CONSTRAINTS_PER_S = 200_000
BUILDING_PART = 0.6


@dataclass(frozen=True)
class Exact:
    """CP-SAT on the whole problem (`exact.model`), from the answer of `Search`.

    Up to `whole` tasks every group is decided on its own, and what CP-SAT proves counts: the step
    is optimal where the simulation of what was found meets its bound, and that nothing fits is
    proved where it finds no solution. On larger graphs groups of one structural class go together,
    so that only better placements can come of it, no proofs.

    The order of the answer is that of CP-SAT, also where a device should wait for an op that is
    not ready while another is (which priorities cannot say, see `Placement.order`).

    Of a budget in seconds the search gets at most `share`, and all where the model would take most
    of the rest to build, or more memory than it is worth: on many devices transfers have a great
    many ways. Under a budget of evaluations alone the
    search gets the same part of them, and each of the others counts as
    `DETERMINISTIC_PER_EVALUATION` of CP-SAT's deterministic time, on one thread: the same seed and
    evaluations give the same plan with the same version of OR-Tools.

    Attributes:
        share: Part of the budget for the search.
        whole: Tasks up to which every group is decided on its own.
        most: Tasks up to which CP-SAT is of any use.
        classes: Classes on larger graphs, at most (if module paths allow).
        start: A placement to start from, as in `Search`.
    """

    name: str = "exact"
    share: float = 0.3
    whole: int = 150
    most: int = 1500
    classes: int = 40
    start: Placement | None = None

    def supports(self, problem: Problem) -> str:
        """Needs OR-Tools, and a graph that is not too large."""
        count = problem.core.tasks.num_tasks
        if count > self.most:
            return (
                f"the graph has {count} tasks, more than the {self.most} that CP-SAT can say "
                f"anything about"
            )
        return missing("ortools", "OR-Tools", "exact") or Search(start=self.start).supports(problem)

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Search, then CP-SAT with what is left."""
        with evaluate.meter.limited_to(self.share):
            found = Search(start=self.start, least_gain=0.0)(problem, evaluate, rng)
        known = evaluate.history.best
        if known is None:
            known = found
        if problem.core.tasks.is_source.all() or least_needs(problem).lack:
            return known
        try:
            return _Solve(self, problem, evaluate, known).run(int(rng.integers(2**31)))
        except ModelSizeError as reason:
            evaluate.notes.append(
                f"the model was not solved, as {reason}; the search went on instead"
            )
        if evaluate.exhausted:
            return known
        return Search(start=known, least_gain=0.0)(problem, evaluate, rng)


class _Solve:
    def __init__(
        self, settings: Exact, problem: Problem, evaluate: Evaluator, known: Placement
    ) -> None:
        self._settings, self._problem, self._evaluate = settings, problem, evaluate
        self._known = known
        timeline = simulate(problem, known)
        run, wires = timeline.run, problem.core.wires
        fits = (run.peak_bytes <= wires.limit_bytes).all()
        self._fits = bool(fits and (run.pool_peak_bytes <= wires.pool_limit_bytes).all())
        self._step_ns = timeline.makespan_ns
        self._timeline = timeline
        self._is_whole = problem.core.tasks.num_tasks <= settings.whole

    def run(self, seed: int) -> Placement:
        """Solve with what the budget leaves, and simulate what was found."""
        cp = cp_model()
        problem, evaluate = self._problem, self._evaluate
        least = evaluate.least_ns or lower_bound(problem).step_ns
        if self._fits and self._step_ns <= least:
            return self._known
        if evaluate.exhausted:
            return self._known
        horizon = self._step_ns - 1 if self._fits else _longest(problem)
        space = self._space(horizon, least)
        model = StepModel(cp, problem, space, self._deadline(space))
        if model.is_too_wide:
            raise ModelSizeError("its times are too long for CP-SAT")
        self._hint(model)
        solver = cp.CpSolver()
        self._limit(solver, seed)
        status = solve(solver, model.model)
        if status == cp.MODEL_INVALID:
            raise AssertionError(model.model.validate())
        if status == cp.INFEASIBLE:
            self._prove(self._step_ns if self._fits else None)
            return self._known
        self._prove_bound(solver)
        if status not in (cp.OPTIMAL, cp.FEASIBLE):
            return self._known
        return self._best(solver, model)

    def _deadline(self, space: Space) -> Callable[[], bool]:
        """Whether building the model must end; refuses one that is too large from the start."""
        evaluate, seconds = self._evaluate, self._evaluate.meter.budget.seconds
        began = evaluate.meter.seconds
        room = np.inf if seconds is None else BUILDING_PART * (seconds - began)
        count = num_constraints(self._problem, space.of_group, space.allowed)
        if count > MAX_CONSTRAINTS or count > CONSTRAINTS_PER_S * room:
            raise ModelSizeError(f"it would have about {count:,} constraints")
        return lambda: evaluate.meter.seconds - began > room

    def _limit(self, solver: Any, seed: int) -> None:
        evaluate = self._evaluate
        budget = evaluate.meter.budget
        solver.parameters.random_seed = seed
        if not budget.is_limited:
            solver.parameters.max_time_in_seconds = 60.0
        if budget.seconds is not None:
            solver.parameters.max_time_in_seconds = max(
                0.01, budget.seconds - evaluate.meter.seconds
            )
        solver.parameters.num_workers = 1 if budget.seconds is None else max(1, evaluate.threads)
        if budget.evaluations is not None:
            left = budget.evaluations - evaluate.meter.num_evaluations
            solver.parameters.max_deterministic_time = left * DETERMINISTIC_PER_EVALUATION

    def _space(self, horizon: int, least: int) -> Space:
        problem, tasks = self._problem, self._problem.core.tasks
        allowed = least_needs(problem).allowed
        with_memory = not self._evaluate.memory_cannot_bind
        if self._is_whole:
            of_group = np.arange(tasks.num_groups, dtype=np.int32)
            return Space(of_group, allowed, horizon, min(least, horizon), with_memory)
        of_group = self._classes()
        count = int(of_group.max()) + 1
        common = np.ones((count, allowed.shape[1]), bool)
        for g, c in enumerate(of_group):
            common[c] &= allowed[g]
        return Space(of_group, common, horizon, min(least, horizon), with_memory)

    def _classes(self) -> I32:
        """Classes of groups that the known placement keeps together and that may go together."""
        problem, settings = self._problem, self._settings
        graph, time = problem.graph, mean_duration_ns(problem)
        chosen = make_classes(problem, coarsen(graph, 1, False, 1).of_op, time)
        for depth in range(2, max_depth(graph) + 1):
            finer = make_classes(problem, coarsen(graph, depth, False, 1).of_op, time)
            if finer.count > settings.classes:
                break
            chosen = finer
        groups = problem.spaces.groups_from_tasks(self._timeline.task_devices)
        keys = np.column_stack([chosen.of_group, groups, least_needs(problem).allowed])
        _, of_group = np.unique(keys, axis=0, return_inverse=True)
        return of_group.reshape(-1).astype(np.int32)

    def _hint(self, model: StepModel) -> None:
        """The known answer. It is no solution, as only better ones are: a place to look at."""
        device, run = self._timeline.task_devices, self._timeline.run
        hinted: set[int] = set()
        for v in range(len(device)):
            choices = model.choices(v)
            for d, x in choices.items() if len(choices) > 1 else ():
                if x.index not in hinted:
                    hinted.add(x.index)
                    model.model.add_hint(x, bool(device[v] == d))
            if not isinstance(model.begin[v], int):
                model.model.add_hint(model.begin[v], int(run.start_ns[v]))

    def _best(self, solver: Any, model: StepModel) -> Placement:
        """The solution, by priorities if they do, else in its order; the known one if neither is
        better."""
        problem, evaluate = self._problem, self._evaluate
        tasks = problem.core.tasks
        count = tasks.num_tasks
        device = np.zeros(count, np.int32)
        begin = np.zeros(count, np.int64)
        for v in range(count):
            device[v] = next(d for d, x in model.choices(v).items() if solver.boolean_value(x))
            begin[v] = solver.value(model.begin[v])
        rank = np.empty(count, np.int64)
        order = np.lexsort((np.arange(count), begin))
        rank[order] = np.arange(count, 0, -1)
        spaces = problem.spaces
        listed = Placement(spaces.op_devices(device), spaces.ops_from_tasks(rank))
        own_order = spaces.order_of(order.tolist(), device, problem.core.num_devices)
        waiting = Placement(listed.devices, listed.priority, own_order)
        best, key = self._known, (0 if self._fits else 1, self._step_ns)
        for candidate in (listed, waiting):
            score = evaluate(candidate)
            own = (0 if score.is_feasible else 1, score.step_ns)
            if own < key:
                best, key = candidate, own
        return best

    def _prove_bound(self, solver: Any) -> None:
        bound = int(np.floor(solver.best_objective_bound + 1e-6))
        self._prove(min(bound, self._step_ns) if self._fits else bound)

    def _prove(self, bound: int | None) -> None:
        """Nothing is faster; or, without a bound, nothing fits."""
        if not self._is_whole:
            return
        if bound is None:
            self._evaluate.is_infeasible = True
        else:
            self._evaluate.proved_ns = max(self._evaluate.proved_ns, bound)


def _longest(problem: Problem) -> int:
    """No schedule takes longer: one thing after the other, everything sent everywhere."""
    wires, transfers = problem.core.wires, problem.core.transfers
    each = transfers.dearest_ns + int(transfers.latency_ns.max(initial=0))
    moves = each.sum() * (len(wires.streams) - 1)
    return int(wires.duration_ns.max(axis=1).sum() + moves + transfers.copy_ns.sum())
