"""devplace's own search: coarse by structure, then fine, then the order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from devplace.graph.coarsen import coarsen, max_depth, side_owner
from devplace.placers.annealing import MOVES, CoolingSchedule, Moves
from devplace.placers.budget import Budget
from devplace.placers.colocation_groups import mean_duration_ns
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.local_search.classes import BestPlacement, Classes, Incumbent, make_classes
from devplace.placers.local_search.explore import UNLIMITED, Explorer
from devplace.placers.local_search.fewer_devices import names_of, with_fewer_devices
from devplace.placers.local_search.refine import improve_order, refine_placement
from devplace.placers.local_search.starts import Starts, nested
from devplace.placers.turns import placed_in_turn
from devplace.problem import Placement, Problem
from devplace.schedule import order_fault

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

# Moves of a native chain without improvement after which it ends.
PATIENCE = 20_000
MAX_CHAINS = 16
MIN_PER_CHAIN = 1000
HEAT_OF_CLASSES = 0.4
# Placements (times orders) times tasks up to which all are tried: about a second.
MAX_TRIED = 1_000_000

# Rounds without improvement after which the search ends where all placements were tried: what is
# left is their order.
TRIED_PATIENCE = 3
# After a round that brought nothing the next is hot: so many times the temperature, for this part
# of the budget.
HOT = (2.0, 4.0, 8.0)
HOT_PART = 0.2
# Steps predicted with measured ops are off by 2.1 % in the median, one in three by more than this
# (docs/results/gpu_prediction.md).
LEAST_GAIN = 0.03
# The last part of the budget goes to the plan on fewer devices, where one will be taken.
SIMPLER_PART = 0.15
# Starts longer than the best by more are begun with only where the graph is small.
NEAR = 1.1
# Moves per group and chain from which on a small graph needs no coarser classes.
MOVES_PER_GROUP = 100


@dataclass(frozen=True)
class Search:
    """Chains of annealing over structural classes, coarse to fine, then the order and moves on the
    critical path.

    Classes are module path x main path or weight-gradient side path (`graph.coarsen`); nothing is
    known of particular models. The plans of all quick placers (`local_search.starts`) are tried
    first, so the result is never worse than any of them, but for `least_gain`. A start with an
    order of its own (`Placement.order`) goes into chains as turns of its ops, which devices wait
    for; it is returned as it was where nothing shorter is found.

    A step that fits and is as short as the lower bound ends the search; so do some rounds without
    improvement once all placements of a tiny graph were tried.

    Attributes:
        width: Chains of annealing; under a budget of time as many as there are threads, up to 16.
        coarse: Classes on the coarsest level, at most (if module paths allow).
        fine: Classes on the finest level, at most.
        exact: Problems with at most this many placements are solved by trying them all; tiny ones
            (`MAX_TRIED`) with more.
        temperature: The first, as a part of the step time; 0: only what is no worse is accepted.
        moves: What the chains try.
        structural: Whether classes come from the structure of the model; else they are ops that
            follow one another in the graph.
        levels: Levels of classes, at most: 1 is the coarsest alone.
        heuristics: Whether the plans of quick placers are tried first; else only single devices.
        improves_order: Whether the order is improved beyond critical-path priorities.
        refines: Whether single ops on the critical path are moved at the end.
        start: A placement to start from, such as `plan.as_placement()`; the result is never worse.
        least_gain: Part of the step that more devices must save; else a plan on fewer is taken, as
            predictions are no better than that. Not with a `start`.
    """

    name: str = "search"
    width: int = 4
    coarse: int = 80
    fine: int = 1500
    temperature: float = 0.005
    exact: int = 4096
    moves: Moves = MOVES
    structural: bool = True
    levels: int = 99
    heuristics: bool = True
    improves_order: bool = True
    refines: bool = True
    start: Placement | None = None
    least_gain: float = LEAST_GAIN

    def supports(self, problem: Problem) -> str:
        """Whenever the placement to start from, if there is one, keeps the problem's demands."""
        if self.start is None:
            return ""
        broken = problem.violations(self.start)
        if broken:
            return f"the start breaks a demand: {broken[0]}"
        order = self.start.order
        if order is None:
            return ""
        devices = problem.spaces.op_devices(problem.task_devices(self.start)).tolist()
        fault = order_fault(problem.graph, devices, order, problem.machine.device_names)
        return f"of the start: {fault.rstrip('.')}" if fault else ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Search until the budget is spent, or nothing better can be found."""
        tried = self._starts(problem, evaluate, rng)
        starts = sorted(tried.found, key=lambda best: best.key)
        incumbent = Incumbent(problem, evaluate, starts[0])
        if problem.core.tasks.num_groups == 0:  # only read-only sources and views
            return Placement(problem.spaces.op_devices_of_groups(starts[0].groups))
        patience = None if evaluate.is_optimal else self._exhaust(incumbent, rng)
        polished: BestPlacement | None = None
        if not evaluate.is_over and patience != 0:
            fast = nested(problem)
            everything = list(problem.usable_devices)
            devices = fast if starts[0].overflow_bytes == 0 else everything
            levels = self._levels(problem, evaluate.meter.budget)
            where = devices, everything
            polished = self._explore(incumbent, starts, levels, where, rng, tried, patience)
        key, ordered = min(
            tried.ordered, key=lambda one: one[0], default=(incumbent.best.key, None)
        )
        best = incumbent.best
        won = ordered if key < best.key else None
        simpler = self._simpler(evaluate, best, tried.simplest, key, won, polished)
        if simpler is not None:
            self._note(evaluate, best.groups if won is None else won, simpler, min(key, best.key))
        elif won is not None:
            return won
        best = simpler or best
        if best.priority is None:
            return Placement(problem.spaces.op_devices_of_groups(best.groups))
        device = problem.spaces.tasks_from_groups(best.groups)
        if best.in_turn:
            return placed_in_turn(problem, device, best.priority)
        return Placement(
            problem.spaces.op_devices(device), problem.spaces.ops_from_tasks(best.priority)
        )

    def _explore(
        self,
        incumbent: Incumbent,
        starts: list[BestPlacement],
        levels: list[Classes],
        where: tuple[list[int], list[int]],
        rng: np.random.Generator,
        tried: Starts | None,
        patience: int | None,
    ) -> BestPlacement | None:
        """Chains from coarse to fine, then the order and the critical path in turn, to the end of
        the budget or until so many rounds in a row have found nothing.

        Args:
            incumbent: The best so far; improved.
            starts, levels: Where chains begin, and what they move.
            where: Devices that the coarsest classes may go to, and all that may be used.
            rng: Of chains and rounds.
            tried: All starts; None: no plan on fewer devices is looked for.
            patience: Rounds without improvement.

        Returns:
            The plan on fewer devices that is nearly as fast, if the end of the budget went to it.
        """
        evaluate, (devices, everything) = incumbent.evaluate, where
        num_groups = incumbent.problem.core.tasks.num_groups
        chains, is_small = self._num_chains(evaluate, num_groups), num_groups <= self.coarse
        explorer = Explorer(incumbent.problem, evaluate, rng, chains)
        limited = evaluate.meter.budget.is_limited

        def run(
            level: Classes,
            begins: list[BestPlacement],
            where: list[int],
            until: float,
            temperature: float,
            critical: float,
            most: int = UNLIMITED,
        ) -> list[BestPlacement]:
            most = most if limited else min(most, 40 * PATIENCE)
            share = critical * self.moves.critical_share
            moves = self.moves if critical else replace(self.moves, order_share=0.0)
            schedule = CoolingSchedule(temperature, share, most, PATIENCE, 0.0, moves)
            found = explorer.run(level, begins, where, until, schedule)
            incumbent.offer(found[0])
            return found

        evaluate.history.runners_up.heading = "start"
        starts = _distinct(starts)
        near = [start for start in starts[1:] if start.step_ns <= NEAR * starts[0].step_ns]
        begins = [starts[0]] * (chains - chains // 2) + near[: chains // 2]
        left = 1 - evaluate.meter.fraction_spent  # after the starts
        found = run(levels[0], begins, devices, 1 - 0.6 * left, self._heat(levels[0]), 0.0)
        for k, level in enumerate(levels[1:]):
            evaluate.history.runners_up.heading = f"level {k + 1}"
            until = 1 - (0.6 - 0.3 * (k + 1) / (len(levels) - 1)) * left
            found = run(
                level, found[: max(2, chains // 4)], everything, until, self.temperature / 4, 0.1
            )
        evaluate.history.runners_up.heading = "fine"
        stale = 0
        while not evaluate.is_over and stale != patience:
            before, known = evaluate.meter.num_evaluations, incumbent.best
            spent = evaluate.meter.fraction_spent
            if tried is not None and limited and spent >= 1 - SIMPLER_PART:
                key = min([known.key, *(key for key, _ in tried.ordered)])
                simpler = self._simpler(evaluate, known, tried.simplest, key, None)
                if simpler is not None and simpler is not tried.simplest:
                    few, mine = np.unique(simpler.groups).tolist(), replace(simpler)
                    last = Incumbent(incumbent.problem, evaluate, mine)
                    self._explore(last, [mine], levels[-1:], (few, few), rng, None, patience)
                    return last.best
                tried = None
            if self.improves_order:
                improve_order(incumbent, rng, spent + 0.1 * (1 - spent), 2 * self.width)
            level = levels[int(rng.integers(len(levels)))]
            temperature = self.temperature * float(rng.choice([0.02, 0.06, 0.2]))
            critical = float(rng.choice([0.0, 0.3, 1.0]))
            until = spent + max(0.04, 0.3 * (1 - spent))
            begins, most = [incumbent.best], UNLIMITED
            if stale:
                level, until = levels[-1], spent + max(HOT_PART, 0.3 * (1 - spent))
                temperature = self._heat(level) * float(rng.choice(HOT))
                critical = float(rng.choice([0.3, 1.0]))
                if is_small:
                    others = rng.integers(len(starts), size=chains // 2).tolist()
                    begins = [incumbent.best] * (chains - chains // 2) + [starts[k] for k in others]
                    most = MOVES_PER_GROUP * level.count
            run(level, begins, everything, min(1.0, until), temperature, critical, most)
            if self.refines:
                refine_placement(incumbent, rng, everything, min(1.0, until + 0.01), self.width)
            stale = stale + 1 if incumbent.best is known else 0
            if not limited or evaluate.meter.num_evaluations == before:
                break
        return None

    def _heat(self, level: Classes) -> float:
        """First temperature: the fewer classes, the dearer each move."""
        return max(self.temperature, HEAT_OF_CLASSES / level.count) if self.temperature else 0.0

    def _num_chains(self, evaluate: Evaluator, num_groups: int) -> int:
        """As many as have enough to spend; under a budget of time, when nobody counts on the same
        plan everywhere, one per thread."""
        if evaluate.meter.budget.evaluations is None:
            return max(self.width, min(MAX_CHAINS, evaluate.threads))
        enough = min(MIN_PER_CHAIN, MOVES_PER_GROUP * num_groups)
        return max(1, min(self.width, evaluate.meter.budget.evaluations // enough))

    def _simpler(
        self,
        evaluate: Evaluator,
        best: BestPlacement,
        single: BestPlacement | None,
        key: tuple[int, int],
        ordered: Placement | None,
        polished: BestPlacement | None = None,
    ) -> BestPlacement | None:
        """The plan on the fewest devices that is nearly as fast as the best, if there is one.

        Args:
            evaluate: The counted simulator.
            best: The best plan without an order of its own.
            single: The best plan on one device.
            key: Of the best plan with an order of its own, or of `best`.
            ordered: That plan, if it is better than `best`.
            polished: What the end of the budget made of a plan on fewer devices.
        """
        problem = evaluate.problem
        key, found = min(key, best.key), best
        device = best.groups if ordered is None else problem.task_devices(ordered)
        count = len(np.unique(device))
        if self.least_gain <= 0 or self.start is not None or key[0] or count == 1:
            return None
        most_ns = max(key[1], math.ceil(key[1] / (1 - self.least_gain)) - 1)
        if single is not None and (0, key[1]) <= single.key <= (0, most_ns):
            found = single
        elif best.key <= (0, most_ns):
            found = with_fewer_devices(problem, evaluate, best, most_ns)
        else:
            return None
        if polished is not None and _is_simpler(polished, found):
            found = polished
        return found if len(np.unique(found.groups)) < count else None

    def _note(
        self,
        evaluate: Evaluator,
        faster: I32 | Placement,
        taken: BestPlacement,
        key: tuple[int, int],
    ) -> None:
        """Say what more devices would have saved, if that is anything."""
        problem = evaluate.problem
        device = problem.task_devices(faster) if isinstance(faster, Placement) else faster
        gain = 1 - key[1] / max(1, taken.step_ns)
        if gain > 0:
            evaluate.notes.append(
                f"{len(np.unique(device))} devices would save {gain:.1%} of the step predicted for "
                f"{names_of(problem, taken.groups)} alone, and predictions may be off by "
                f"{self.least_gain:.0%}: the simpler plan is taken (Search(least_gain=0) takes "
                f"the faster one)"
            )

    def _starts(self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> Starts:
        """All trivial plans, tried."""
        starts = Starts(problem, evaluate, rng)
        if self.start is not None:
            starts.keep(self.start, "start")
        starts.single_devices()
        if self.heuristics:
            starts.cheap_placers()
        return starts

    def _exhaust(self, incumbent: Incumbent, rng: np.random.Generator) -> int | None:
        """Try every placement of a small problem, and of a tiny one with many orders.

        Returns:
            Rounds without improvement that are of use from here on: none where every placement was
            tried with every order, `TRIED_PATIENCE` where every placement was tried, else no limit.
        """
        evaluate, tasks = incumbent.evaluate, incumbent.problem.core.tasks
        allowed = incumbent.problem.allowed
        tiny = MAX_TRIED // max(1, tasks.num_tasks)
        most = max(self.exact, tiny)
        if np.log(allowed.sum(axis=1)).sum() > 1 + np.log(most):  # the product may be huge
            return None
        choices = [np.flatnonzero(row).tolist() for row in allowed]
        count = math.prod(len(options) for options in choices)
        left = evaluate.meter.budget.evaluations or count
        if count > min(most, left):
            return None
        every = np.array(list(itertools.product(*choices)), np.int32)
        for first in range(0, count, 64):
            incumbent.try_all(every[first : first + 64])
            if evaluate.is_over:
                return None
        orders = min(tiny // count, (left - evaluate.meter.num_evaluations) // (2 * count))
        work = np.flatnonzero(tasks.is_source == 0)
        for order in _orders(work, orders, rng):
            priority = np.zeros(tasks.num_tasks, np.int64)
            priority[order] = np.arange(len(order), 0, -1)
            incumbent.try_all(every, priority)
            if evaluate.is_over:
                return None
        return 0 if _are_all(len(work), orders) else TRIED_PATIENCE

    def _needs_no_coarse(self, num_groups: int, budget: Budget) -> bool:
        """Whether chains can begin with single groups: few, with many moves for each."""
        most = budget.evaluations
        enough = most is None or most // self.width >= MOVES_PER_GROUP * num_groups
        return num_groups <= self.coarse and enough

    def _levels(self, problem: Problem, budget: Budget) -> list[Classes]:
        """Classes from coarse to fine; levels that add nothing are left out."""
        if not self.structural:
            sizes = [self.coarse * 4**k for k in range(self.levels)]
            sizes = [size for size in sizes if size <= min(self.fine, len(problem.graph.ops))]
            return [_blocks(problem, size) for size in sizes or [self.coarse]]
        graph, time = problem.graph, mean_duration_ns(problem)
        deepest, owner = max_depth(graph), side_owner(graph)
        kinds = [(depth, False, 1) for depth in range(1, deepest + 1)]
        kinds += [(deepest, True, 1), (deepest, True, 2), (deepest, True, 4), (deepest, True, 8)]
        kinds += [(deepest, True, 16), (deepest, True, 32)]
        levels: list[Classes] = []
        for depth, by_micro_batch, calls in kinds:
            of_op = coarsen(graph, depth, by_micro_batch, calls, owner).of_op
            level = make_classes(problem, of_op, time)
            if level.count > self.fine:
                break
            if levels and (level.count <= levels[0].count or level.count <= self.coarse):
                levels.clear()
            if not levels or level.count > 1.2 * levels[-1].count:
                levels.append(level)
        if not levels:
            levels.append(_blocks(problem, self.fine))
        if levels[-1].count < problem.core.tasks.num_groups <= self.fine:
            per_group = problem.spaces.ops_from_tasks(problem.core.tasks.group)
            if self._needs_no_coarse(problem.core.tasks.num_groups, budget):
                levels.clear()
            levels.append(make_classes(problem, per_group, time))
        return levels[: self.levels]


def _is_simpler(one: BestPlacement, other: BestPlacement) -> bool:
    """Whether a plan is on fewer devices than another, or on as many and faster."""
    counts = len(np.unique(one.groups)), len(np.unique(other.groups))
    return (counts[0], one.key) < (counts[1], other.key)


def _distinct(starts: list[BestPlacement]) -> list[BestPlacement]:
    """The first of each placement."""
    first: dict[bytes, BestPlacement] = {}
    for start in starts:
        first.setdefault(start.groups.tobytes(), start)
    return list(first.values())


def _blocks(problem: Problem, count: int) -> Classes:
    """Classes of ops that follow one another in the graph."""
    total = len(problem.graph.ops)
    of_op = (np.arange(total, dtype=np.int64) * count // total).astype(np.int32)
    return make_classes(problem, of_op, mean_duration_ns(problem))


def _orders(work: I64, most: int, rng: np.random.Generator) -> Iterator[I64]:
    """All orders of tasks, or this many random ones."""
    if len(work) < 2 or most < 1:
        return
    if _are_all(len(work), most):
        yield from (np.array(row) for row in itertools.permutations(work))
        return
    for _ in range(most):
        yield rng.permutation(work)


def _are_all(count: int, most: int) -> bool:
    """Whether `_orders` gives all orders of so many tasks."""
    return count < 2 or (count <= 7 and math.factorial(count) <= most)
