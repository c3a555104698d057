"""Where a search begins: the plans of all cheap placers, on more and more of the devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from devplace.placers.budget import Budget
from devplace.placers.colocation_groups import by_vote, mean_duration_ns
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.list_schedulers.etf import Etf
from devplace.placers.list_schedulers.heft import Heft
from devplace.placers.list_schedulers.m_etf import MEtf
from devplace.placers.list_schedulers.m_topo import MTopo
from devplace.placers.list_schedulers.mayer import Mayer
from devplace.placers.local_search.classes import BestPlacement
from devplace.placers.modules import module_chain
from devplace.placers.orders import has_micro_batches, held_back, priorities_of
from devplace.placers.partitioners.pipedream import pipeline_over
from devplace.placers.placer import Placer
from devplace.placers.simple.data_parallel import DataParallel, data_parallel
from devplace.placers.simple.even import even_split, shares, there_and_back
from devplace.placers.simple.expert import Expert
from devplace.placers.simple.greedy import Greedy
from devplace.placers.simple.layers import Layers, layers_over
from devplace.placers.simple.single import all_on
from devplace.placers.turns import turns_of
from devplace.problem import Placement, Problem

I32 = NDArray[np.int32]
Ordered = tuple[tuple[int, int], Placement]
"""Bytes over the limits and step time in its own order; a placement with an order."""

ALL_COUNTS = 8
"""Devices up to which every number of them is tried; beyond that each half as many again."""
# What the list schedulers together take per task and device (a core of a server CPU), s, and the
# part of the time that they may take.
LIST_S_PER_PAIR = 70e-6
LIST_PART = 0.3


class Starts:
    """Trivial plans, tried one after the other.

    Args:
        problem: What is placed.
        evaluate: Counts what is simulated.
        rng: For placers that draw.

    Attributes:
        found: Placements with what they score, as chains take them.
        headings: Which placer each is from.
        ordered: Placements with an order of their own, which `found` has as turns.
        simplest: The best with everything on one device.
    """

    def __init__(self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> None:
        self.found: list[BestPlacement] = []
        self.headings: list[str] = []
        self.ordered: list[Ordered] = []
        self.simplest: BestPlacement | None = None
        self._problem, self._evaluate, self._rng = problem, evaluate, rng
        self._first = _first_task_of_group(problem)
        self._seen: set[bytes] = set()

    def keep(self, placement: Placement, heading: str = "") -> None:
        """Try a placement: in its own order, or in all usual ones if it has none."""
        problem, evaluate = self._problem, self._evaluate
        evaluate.history.runners_up.heading = heading
        if placement.order is not None:
            self.ordered.append((evaluate(placement).key, placement))
            turn = problem.spaces.ops_from_tasks(turns_of(problem, placement))
            self._add(Placement(placement.devices, turn), in_turn=True)
            return
        if placement.priority is not None:
            self._add(placement)
            return
        key = placement.devices.tobytes()
        if key in self._seen:
            return
        self._seen.add(key)
        orders = priorities_of(problem, placement)
        over = self._add(next(orders))
        if over or has_micro_batches(problem):
            over = min([over, *(self._add(order) for order in orders)])
        if over:
            for order in held_back(problem, placement):
                self._add(order, in_turn=True)

    def _add(self, placement: Placement, in_turn: bool = False) -> int:
        """Simulate; bytes over the limits."""
        problem, device = self._problem, self._problem.task_devices(placement)
        priority = placement.priority
        if priority is not None:
            priority = problem.task_priority(priority)
        step, over = self._evaluate.batch(device[None, :], priority, in_turn)
        kept = BestPlacement(device[self._first], int(step[0]), int(over[0]), priority, in_turn)
        self.found.append(kept)
        self.headings.append(self._evaluate.history.runners_up.heading)
        return kept.overflow_bytes

    def single_devices(self) -> None:
        """Everything on each device; the best is kept as `simplest`."""
        before = len(self.found)
        for device in self._problem.usable_devices:
            self.keep(all_on(self._problem, device), "single")
        self.simplest = min(self.found[before:], key=lambda best: best.key, default=None)

    def cheap_placers(self) -> None:
        """Splits over more and more of the devices, then what places on all of them."""
        problem, evaluate = self._problem, self._evaluate
        for heading, placement in _splits(problem):
            if evaluate.exhausted:
                return
            self.keep(placement, heading)
        for placer in _placers(problem, evaluate.meter.budget):
            if not evaluate.exhausted and not placer.supports(problem):
                self.keep(placer(problem, evaluate, self._rng), placer.name)


def _splits(problem: Problem) -> Iterator[tuple[str, Placement]]:
    """A plan for some devices is one for more: so all splits are made of the best two, the best
    three ..., and of the accelerators."""
    chain, best = module_chain(problem), nested(problem)
    weight = mean_duration_ns(problem)
    has_layers = not Layers().supports(problem)
    is_parted = not DataParallel().supports(problem)
    chosen = [sorted(best[:count]) for count in _counts(len(best))]
    for devices in (*chosen, problem.accelerators):
        yield "even", even_split(problem, chain, devices)
        wish = np.array(devices, np.int32)[shares(weight, len(devices))]
        yield "topo", Placement(problem.spaces.op_devices_of_groups(by_vote(problem, wish, weight)))
        yield "pipedream", pipeline_over(problem, devices)
        if has_layers:
            yield "layers", layers_over(problem, chain, devices)
        if has_micro_batches(problem):
            yield "there and back", there_and_back(problem, chain, devices)
        if is_parted:
            yield "data-parallel", data_parallel(problem, devices)


def _counts(most: int) -> Iterator[int]:
    count = 2
    while count < most:
        yield count
        count += 1 if count < ALL_COUNTS else count // 2
    if most > 1:
        yield most


def nested(problem: Problem) -> list[int]:
    """Accelerators, and CPUs that are no slower, the fastest first; of equally fast ones that with
    the fastest links to those before it."""
    wires, fast = problem.core.wires, problem.accelerators
    work = wires.duration_ns.sum(axis=0)
    left = [d for d in problem.usable_devices if d in fast or work[d] <= work[fast].max()]
    transfers = problem.core.transfers
    way = transfers.transfer_ns.sum(axis=1)[transfers.link_class] + transfers.latency_ns
    chosen: list[int] = []
    while left:
        links = (way[left][:, chosen] + way[chosen][:, left].T).sum(axis=1)
        at = int(np.lexsort((left, links, work[left]))[0])
        chosen.append(left.pop(at))
    return chosen


def _placers(problem: Problem, budget: Budget) -> tuple[Placer, ...]:
    """Cheap placers that choose devices themselves; list schedulers, which are plain Python, where
    they leave most of the time to the search."""
    pairs = problem.core.tasks.num_tasks * len(problem.machine.devices)
    quick: tuple[Placer, ...] = (Expert(), Greedy(), MTopo())
    if budget.seconds is not None and pairs * LIST_S_PER_PAIR > LIST_PART * budget.seconds:
        return quick
    return (*quick, Heft(), Etf(), MEtf(), Mayer())


def _first_task_of_group(problem: Problem) -> I32:
    every = np.arange(problem.core.tasks.num_tasks, dtype=np.int32)
    return problem.spaces.groups_from_tasks(every)
