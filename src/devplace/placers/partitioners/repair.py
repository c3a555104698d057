"""Memory repair: move ops off devices that hold too much, as cheaply as possible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.colocation_groups import (
    I32,
    I64,
    legal,
    mean_duration_ns,
)
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.modules import module_chain
from devplace.placers.orders import best_score
from devplace.placers.partitioners.group_graph import GroupGraph, group_graph
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate

ROUNDS = 30
PATIENCE = 6
"""Rounds without progress after which smaller pieces are moved, or repair gives up."""


def repaired(problem: Problem, placement: Placement, evaluate: Evaluator) -> Placement:
    """The placement with pieces moved until every memory limit holds, or as near as was found.

    Each round simulates and moves pieces away from every device (and pool) over its limit,
    to where they fit (accelerators first): those that add the least traffic per byte set free.
    Bytes are those in use when the device peaks. Pieces are what a module has on the device, what a
    call of a module has there, or single colocation groups; all three are tried from the start and
    the fastest result that fits is kept. Kept activations move with the ops that read them, as
    these are of the same module call.

    Uses one or two evaluations a round, at most 30 rounds for each kind of piece.
    """
    if evaluate.exhausted:
        return placement
    best, key = placement, best_score(evaluate, placement).key
    if key[0] == 0:
        return best
    start = (placement, key)
    pieces = _Pieces(problem)
    for labels in pieces.kinds():
        found, its_key = _rounds(problem, *start, evaluate, pieces, labels)
        if its_key < key:
            best, key = found, its_key
    if key[0] > 0:  # what is left over may be small enough for single groups
        best, key = _rounds(problem, best, key, evaluate, pieces, pieces.kinds()[-1])
    return best


def _rounds(
    problem: Problem,
    best: Placement,
    key: tuple[int, int],
    evaluate: Evaluator,
    pieces: _Pieces,
    labels: I64,
) -> tuple[Placement, tuple[int, int]]:
    current, stale = best, 0
    for number in range(ROUNDS):
        if key[0] == 0 or stale > PATIENCE or evaluate.exhausted:
            break
        timeline = simulate(problem, current)
        # each round aims a little lower, as moved ops change the peaks
        moved = _Round(problem, timeline, pieces, labels, 1 + 0.02 * number).move()
        if moved is None:
            break
        current = Placement(problem.spaces.op_devices_of_groups(legal(problem, moved)))
        score = best_score(evaluate, current)
        stale += 1
        if score.key < key:
            best, key, stale = current, score.key, 0
    return best, key


class _Pieces:
    """What may be moved, and what is next to it."""

    def __init__(self, problem: Problem) -> None:
        self.graph: GroupGraph = group_graph(problem)
        self._problem = problem

    def kinds(self) -> list[I64]:
        """Piece of each group, for each size of pieces. `[G]` each"""
        problem, tasks = self._problem, self._problem.core.tasks
        single = np.arange(tasks.num_groups)
        chain = module_chain(problem)
        if len(chain.names) < 2:
            return [single]
        # the costliest op of a group tells its module
        order = np.argsort(mean_duration_ns(problem), kind="stable")
        task = np.zeros(tasks.num_groups, np.int64)
        task[tasks.group[order]] = order
        ops = [problem.graph.ops[index] for index in tasks.task_op[task]]
        module = chain.of_task[task].tolist()
        calls = {(m, op.call, op.micro_batch) for m, op in zip(module, ops, strict=True)}
        number = {key: k for k, key in enumerate(sorted(calls))}
        call = [number[m, op.call, op.micro_batch] for m, op in zip(module, ops, strict=True)]
        return [np.array(module, np.int64), np.array(call, np.int64), single]


@dataclass
class _Room:
    """Bytes left on each device `[D]` and in each pool `[P]`, and the pool of each device `[D]`."""

    devices: NDArray[np.float64]
    pools: NDArray[np.float64]
    pool: I32

    def left(self, source: int, target: int) -> float:
        """Bytes that may move from one device to another."""
        pool = self.pool[target]
        if pool < 0 or pool == self.pool[source]:
            return float(self.devices[target])
        return float(min(self.devices[target], self.pools[pool]))

    def take(self, source: int, target: int, size: float) -> None:
        """Move so many bytes."""
        self.devices[target] -= size
        pool = self.pool[target]
        if pool >= 0 and pool != self.pool[source]:
            self.pools[pool] -= size


@dataclass
class _Round:
    """Moves of one round, by what the simulation of the present placement tells.

    Attributes:
        problem: What is placed.
        timeline: Its simulation.
        pieces: What may be moved.
        labels: Piece of each group. `[G]`
        aim: Over-use is multiplied by this.
    """

    problem: Problem
    timeline: Timeline
    pieces: _Pieces
    labels: I64
    aim: float

    def move(self) -> I32 | None:
        """New device of each group, or None if nothing can move. `[G]`"""
        wires = self.problem.core.wires
        device = self.problem.spaces.groups_from_tasks(self.timeline.task_devices)
        room = _Room(
            (wires.limit_bytes - self.timeline.peak_bytes).astype(np.float64),
            (wires.pool_limit_bytes - self.timeline.pool_peak_bytes).astype(np.float64),
            wires.pool,
        )
        over = self._over(room)
        found = False
        for source in np.argsort(-over, kind="stable").tolist():
            if over[source] > 0:
                found |= self._empty(source, float(over[source]) * self.aim, device, room)
        return device if found else None

    def _over(self, room: _Room) -> I64:
        """Bytes each device should give away. `[D]`"""
        over = np.maximum(-room.devices, 0)
        for index, missing in enumerate(np.maximum(-room.pools, 0)):
            members = np.flatnonzero(room.pool == index)
            if missing > over[members].sum():
                fullest = members[self.timeline.peak_bytes[members].argmax()]
                over[fullest] += missing - over[members].sum()
        return np.ceil(over).astype(np.int64)

    def _empty(self, source: int, need: float, device: I32, room: _Room) -> bool:
        """Move pieces off one device until enough is free; changes `device` and `room`."""
        on = np.flatnonzero(device == source)
        piece, member = np.unique(self.labels[on], return_inverse=True)
        freed, taken = self._sizes(source, device)
        gain = np.bincount(member, freed[on], len(piece))
        size = np.bincount(member, taken[on], len(piece))
        links, may = self._links(on, member, len(piece), device)
        may &= (gain > 0)[:, None]
        found = False
        while need > 0 and may.any():
            best = None
            for targets in self._targets(source):
                for target in targets:
                    fits = may[:, target] & (size <= room.left(source, target))
                    if not fits.any():
                        continue
                    cost = (links[:, source] - links[:, target]) / np.minimum(gain, need).clip(1)
                    at = int(np.where(fits, cost, np.inf).argmin())
                    key = (cost[at], -room.left(source, target), target, at)
                    best = key if best is None or key < best else best
                if best is not None:
                    break
            if best is None:
                break
            _, _, target, at = best
            device[on[member == at]] = target
            may[at] = False
            room.take(source, target, size[at])
            need -= gain[at]
            found = True
        return found

    def _targets(self, source: int) -> tuple[list[int], list[int]]:
        """Where pieces may go: accelerators, and if none has room the rest."""
        first = [d for d in self.problem.accelerators if d != source]
        rest = [d for d in self.problem.usable_devices if d != source and d not in first]
        return first, rest

    def _sizes(self, source: int, device: I32) -> tuple[I64, I64]:
        """Bytes that moving each group sets free here, and takes elsewhere. `[G]`, `[G]`"""
        tasks = self.problem.core.tasks
        alive = self._alive(source)
        home = tasks.group[tasks.storage_maker]
        here = (device[home] == source) & alive
        taken = np.zeros(tasks.num_groups, np.int64)
        np.add.at(taken, home[here], tasks.storage_bytes[here])
        # what another piece on this device reads stays here as a copy
        carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
        reader = tasks.group[tasks.cons]
        storage = tasks.carrier_storage[carrier]
        stays = (device[reader] == source) & (self.labels[reader] != self.labels[home[storage]])
        kept = np.zeros(len(tasks.storage_bytes), bool)
        kept[storage[stays]] = True
        freed = np.zeros(tasks.num_groups, np.int64)
        free = here & ~kept
        np.add.at(freed, home[free], tasks.storage_bytes[free])
        self._add_consts(freed)
        return freed, np.maximum(taken, freed)

    def _add_consts(self, freed: I64) -> None:
        """A read-only source goes with its readers if all are of one piece."""
        tasks = self.problem.core.tasks
        for const, (first, last) in enumerate(
            zip(tasks.const_ptr[:-1], tasks.const_ptr[1:], strict=True)
        ):
            readers = tasks.group[tasks.const_user[first:last]]
            if len(readers) and (self.labels[readers] == self.labels[readers[0]]).all():
                freed[readers[0]] += tasks.const_bytes[const]

    def _alive(self, source: int) -> NDArray[np.bool_]:
        """Storages in use, wherever they are, when the device peaks. `[S]`"""
        tasks, timeline = self.problem.core.tasks, self.timeline
        rows = timeline.memory[timeline.memory[:, 1] == source]
        peak = int(rows[rows[:, 2].argmax(), 0]) if len(rows) else 0
        start = timeline.run.start_ns
        finish = timeline.run.finish_ns
        born = start[tasks.storage_maker]
        dies = finish[tasks.storage_maker].copy()
        carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
        np.maximum.at(dies, tasks.carrier_storage[carrier], finish[tasks.cons])
        dies[tasks.storage_held > 0] = timeline.makespan_ns
        is_source = tasks.is_source[tasks.storage_maker] > 0
        alive: NDArray[np.bool_] = (is_source | (born <= peak)) & ((dies >= peak) | is_source)
        return alive

    def _links(
        self, on: NDArray[np.intp], member: NDArray[np.intp], count: int, device: I32
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Bytes between each piece and each device, and where each piece may go. `[P, D]` each"""
        graph, labels = self.pieces.graph, self.labels
        num_devices = self.problem.core.num_devices
        row = np.full(graph.num_groups, -1, np.int64)
        row[on] = member
        ends = np.repeat(np.arange(graph.num_groups), np.diff(graph.ptr))
        outside = (row[ends] >= 0) & (labels[ends] != labels[graph.neighbour])
        cell = row[ends[outside]] * num_devices + device[graph.neighbour[outside]]
        links = np.bincount(cell, graph.num_bytes[outside], count * num_devices).astype(np.float64)
        may = np.ones((count, num_devices), bool)
        np.logical_and.at(may, member, self.problem.allowed[on])
        return links.reshape(count, num_devices), may
