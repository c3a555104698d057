"""The chains of native/search/anneal.hpp in plain Python: the same moves, numbers and placements.

Slow and obvious: every move is simulated as a whole. It stands in where the native module was not
built, and tests hold the native one against it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from devplace.placers.annealing import CoolingSchedule, MoveSpace
from devplace.problem import Core
from devplace.simulator.critical import critical_tasks
from devplace.simulator.reference import critical_path_priority, simulate_core

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
NEVER = 1e300
_MASK = 2**64 - 1


class SplitMix:
    """Random numbers that are the same everywhere (Steele, Lea and Flood 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0x1234567) & _MASK

    def uniform(self) -> float:
        """In [0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return float((z ^ (z >> 31)) >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """In 0 .. count - 1."""
        return int(self.uniform() * count)


def anneal(
    core: Core,
    space: MoveSpace,
    schedule: CoolingSchedule,
    starts: I32,
    priorities: I64 | None,
    in_turn: NDArray[np.uint8],
    seeds: I64,
) -> tuple[I32, I64, I64, I64, I64, I64, bool]:
    """As `NativeKernel.anneal`, one chain after the other; Ctrl-C is raised at once."""
    found = []
    for k, seed in enumerate(seeds.tolist()):
        chain = _Chain(core, space, schedule, seed, schedule.seconds / len(seeds))
        given = None if priorities is None else priorities[k]
        found.append(chain.run(starts[k], given, bool(in_turn[k])))
    groups, priority, waits, step, overflow, made = zip(*found, strict=True)
    return (
        np.stack(groups),
        np.stack(priority),
        np.array(waits, np.int64),
        np.array(step, np.int64),
        np.array(overflow, np.int64),
        np.array(made, np.int64),
        False,
    )


class _Chain:
    """One chain; the names are those of the native one."""

    def __init__(
        self, core: Core, space: MoveSpace, schedule: CoolingSchedule, seed: int, seconds: float
    ) -> None:
        self._core, self._space, self._schedule = core, space, schedule
        self._random = SplitMix(seed)
        self._seconds, self._begin, self._now, self._tries = seconds, time.monotonic(), 0.0, 0
        self._made = self._step = self._overflow = 0
        self._value = self._best_value = 0.0
        self._best: tuple[I32, I64, bool, int, int]
        self._in_turn = False
        self._order: tuple[int, int] | None = None
        self._moved: list[tuple[int, int]] = []
        self._chain: list[int] = []
        bounds = space.class_ptr.tolist()
        members = space.class_groups.tolist()
        self._members = [members[a:b] for a, b in pairwise(bounds)]
        self._tasks_of: list[list[int]] = [[] for _ in space.group_class]
        for task, group in enumerate(space.task_group.tolist()):
            self._tasks_of[group].append(task)

    def run(
        self, groups: I32, priority: I64 | None, in_turn: bool
    ) -> tuple[I32, I64, bool, int, int, int]:
        """Best groups, priorities, whether devices wait, step time, bytes over limits; simulations
        made."""
        self._groups = groups.copy()
        self._start(priority, in_turn)
        self._keep_best()
        self._refocus()
        stale, most = 0, self._schedule.most_evaluations
        patience = self._schedule.patience
        while self._made < most and stale < patience and not self._is_done():
            temperature = (
                self._best_value * self._schedule.temperature * math.exp(-6.0 * self._spent())
            )
            bar = self._value - temperature * math.log(max(1e-300, self._random.uniform()))
            stale += 1
            if not self._propose():
                continue
            found = self._evaluate(bar)
            if found > bar:
                self._undo()
                continue
            is_other = found != self._value
            self._value = found
            if self._value < self._best_value * (1 - 1e-6):
                self._keep_best()
                stale = 0
            if is_other:
                self._refocus()
        return (*self._best, self._made)

    def _is_done(self) -> bool:
        *_, step, overflow = self._best
        return (overflow == 0 and step <= self._schedule.least_ns) or self._is_late()

    def _device(self) -> I32:
        return self._groups[self._space.task_group]

    def _start(self, given: I64 | None, in_turn: bool) -> None:
        self._made += 1
        device = self._device()
        self._priority = critical_path_priority(self._core, device)
        self._value = self._simulate(device, self._priority)
        if given is None:
            return
        own = self._value, self._step, self._overflow
        self._in_turn = in_turn
        value = self._simulate(device, given)
        if value < own[0]:
            self._value, self._priority = value, given.copy()
        else:
            self._value, self._step, self._overflow = own
            self._in_turn = False

    def _simulate(self, device: I32, priority: I64, bar: float = NEVER) -> float:
        """Value of a placement, `NEVER` if its step alone is above the bar."""
        run = simulate_core(self._core, device, priority, priority if self._in_turn else None)
        step, share = int(run.makespan_ns), 0.0
        if step > int(min(bar, 9e18)):
            return NEVER
        self._step, self._overflow = step, 0
        if not self._space.tracks_memory:
            return float(step)
        limits = self._space.limit_bytes
        over = np.maximum(run.peak_bytes - limits, 0).sum()
        pools = np.maximum(run.pool_peak_bytes - self._space.pool_limit_bytes, 0).sum()
        self._overflow = int(over + pools)
        share = float(self._overflow) / float(max(1, int(limits.min())))
        return float(step) * (1 + 2 * share + (0.05 if self._overflow > 0 else 0.0))

    def _evaluate(self, bar: float) -> float:
        self._made += 1
        device = self._device()
        self._held = self._priority, self._in_turn
        if self._order is not None:
            found = self._earlier(*self._order)
            if found is None:
                return NEVER
            self._priority = found
            return self._simulate(device, self._priority, bar)
        if self._random.uniform() < self._schedule.moves.fresh_share:
            self._priority, self._in_turn = critical_path_priority(self._core, device), False
        return self._simulate(device, self._priority, bar)

    def _earlier(self, task: int, other: int) -> I64 | None:
        """Priorities with `task`, and all before it that now come later, before `other`; None if
        that is impossible or changes nothing."""
        tasks = self._core.tasks
        order = np.lexsort((np.arange(len(self._priority)), -self._priority)).tolist()
        rank = {v: k for k, v in enumerate(order)}
        if rank[other] >= rank[task]:
            return None
        earlier = [task]
        for v in earlier:
            reads = tasks.in_carrier[tasks.in_ptr[v] : tasks.in_ptr[v + 1]]
            for u in tasks.carrier_maker[reads].tolist():
                if rank[u] < rank[other] or tasks.is_source[u] or u in earlier:
                    continue
                if u == other:
                    return None
                earlier.append(u)
        first, last = rank[other], rank[task] + 1
        between = order[first:last]
        ahead = [v for v in between if v in earlier] + [v for v in between if v not in earlier]
        priority = np.zeros(len(order), np.int64)
        priority[order[:first] + ahead + order[last:]] = np.arange(len(order), 0, -1)
        return priority

    def _undo(self) -> None:
        for group, old in reversed(self._moved):
            self._groups[group] = old
        self._priority, self._in_turn = self._held

    def _keep_best(self) -> None:
        self._best_value = self._value
        kept = self._groups.copy(), self._priority.copy()
        self._best = (*kept, self._in_turn, self._step, self._overflow)

    def _refocus(self) -> None:
        """The critical path of the present state, and how likely each class is to move."""
        space, device = self._space, self._device()
        turn = self._priority if self._in_turn else None
        run = simulate_core(self._core, device, self._priority, turn)
        self._chain = critical_tasks(self._core, device, run)
        count = len(space.class_weight)
        share, total = [0.0] * count, 0.0
        for task in self._chain:
            length = float(self._core.wires.duration_ns[task, device[task]])
            share[space.group_class[space.task_group[task]]] += length
            total += length
        weights = [
            0.4 * weight + 0.2 / float(count) + (0.4 * part / total if total > 0 else 0.0)
            for weight, part in zip(space.class_weight.tolist(), share, strict=True)
        ]
        self._sums = list(accumulate(weights, initial=0.0))[1:]

    def _some_class(self) -> int:
        at = bisect_right(self._sums, self._random.uniform() * self._sums[-1])
        return min(at, len(self._sums) - 1)

    def _some_device(self) -> int:
        return int(self._space.devices[self._random.below(len(self._space.devices))])

    def _move_group(self, group: int, wish: int) -> None:
        target = int(self._space.target[group, wish])
        if self._groups[group] != target:
            self._moved.append((group, int(self._groups[group])))
            self._groups[group] = target

    def _move_class(self, number: int, wish: int) -> None:
        for group in self._members[number]:
            self._move_group(group, wish)

    def _move_some_class(self) -> None:
        number = self._some_class()
        is_beside = self._random.uniform() < self._schedule.moves.beside_share
        self._move_class(number, self._device_beside(number) if is_beside else self._some_device())

    def _device_of_class(self, number: int) -> int:
        return int(self._groups[self._members[number][0]])

    def _propose(self) -> bool:
        """Change groups, or say which task comes before which; whether anything came of it."""
        random, moves = self._random, self._schedule.moves
        self._moved, self._order = [], None
        if random.uniform() < moves.order_share:
            return self._propose_order()
        kind = random.uniform()
        if self._chain and random.uniform() < self._schedule.critical_share:
            self._move_critical()
        elif kind < moves.swap_share:
            self._swap_classes()
        elif kind < moves.swap_share + moves.run_share:
            self._move_classes_in_a_row()
        elif kind < moves.swap_share + moves.run_share + moves.part_share:
            self._move_part()
        else:
            self._move_some_class()
            if kind < moves.swap_share + moves.run_share + moves.part_share + moves.pair_share:
                self._move_some_class()
        return bool(self._moved)

    def _propose_order(self) -> bool:
        """A task of the critical path that waited for its device, and one that it waited for."""
        chain, last = self._chain, len(self._chain) - 1
        for _ in range(8 if last > 0 else 0):
            k = self._random.below(last)
            if not self._waits_for_device(k):
                continue
            task, k = chain[k], k + 1
            while k < last and self._waits_for_device(k) and self._random.uniform() < 0.5:
                k += 1
            self._order = task, chain[k]
            return True
        return False

    def _waits_for_device(self, k: int) -> bool:
        tasks, of = self._core.tasks, self._space.task_group
        v, u = self._chain[k], self._chain[k + 1]
        makers = tasks.carrier_maker[tasks.in_carrier[tasks.in_ptr[v] : tasks.in_ptr[v + 1]]]
        return bool(self._groups[of[v]] == self._groups[of[u]] and u not in makers)

    def _swap_classes(self) -> None:
        a, b = self._some_class(), self._some_class()
        to_a, to_b = self._device_of_class(b), self._device_of_class(a)
        if a != b:
            self._move_class(a, to_a)
            self._move_class(b, to_b)

    def _move_classes_in_a_row(self) -> None:
        random, count = self._random, len(self._members)
        length = 2 + random.below(max(1, count // 4))
        first = random.below(count)
        target = self._some_device()
        for number in range(first, min(count, first + length)):
            self._move_class(number, target)

    def _move_part(self) -> None:
        """All that a device has of the model before or behind some class goes to another device."""
        number = self._some_class()
        here, target = self._device_of_class(number), self._some_device()
        is_rest = self._random.uniform() < 0.5
        for c in range(number, len(self._members)) if is_rest else range(number + 1):
            if self._device_of_class(c) == here:
                self._move_class(c, target)

    def _device_beside(self, number: int) -> int:
        """Where a task is that gives to, or takes from, a random task of this class."""
        tasks = self._core.tasks
        here = self._device_of_class(number)
        for _ in range(4):
            group = self._pick(self._members[number])
            v = self._pick(self._tasks_of[group])
            givers = tasks.carrier_maker[tasks.in_carrier[tasks.in_ptr[v] : tasks.in_ptr[v + 1]]]
            first, last = tasks.cons_ptr[tasks.out_ptr[v]], tasks.cons_ptr[tasks.out_ptr[v + 1]]
            others = [*givers.tolist(), *tasks.cons[first:last].tolist()]
            if others:
                there = int(self._groups[self._space.task_group[self._pick(others)]])
                if there != here:
                    return there
        return self._some_device()

    def _pick(self, numbers: list[int]) -> int:
        return numbers[self._random.below(len(numbers))]

    def _move_critical(self) -> None:
        """A run of the critical path goes to the device of its neighbour there, or to any."""
        random, chain, of = self._random, self._chain, self._space.task_group
        count = len(chain)
        first, length = random.below(count), 1
        if random.uniform() < 0.7:
            while length < count and random.uniform() < 0.7:
                length += 1
        here = self._groups[of[chain[first]]]
        target = self._some_device()
        if random.uniform() < 0.7:
            ahead = random.uniform() < 0.5
            beside = min(count - 1, first + length) if ahead else max(0, first - 1)
            there = int(self._groups[of[chain[beside]]])
            if there != here:
                target = there
        for task in chain[first : min(count, first + length)]:
            self._move_group(int(of[task]), target)

    def _is_late(self) -> bool:
        if self._seconds <= 0:
            return False
        if self._tries % 8 == 0:
            self._now = time.monotonic() - self._begin
        self._tries += 1
        return self._now >= self._seconds

    def _spent(self) -> float:
        parts = [self._made / max(1, self._schedule.most_evaluations)]
        if self._seconds > 0:
            parts.append(self._now / self._seconds)
        return min(1.0, max(parts))
