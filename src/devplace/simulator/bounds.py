"""Lower bounds on the step time of any placement and order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem
from devplace.simulator.memory_bounds import Needs, least_needs
from devplace.simulator.paths import NEVER, Paths, communication_paths
from devplace.simulator.shared_work import dual_weights, memory_load, window_bound

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Lack = Literal["", "static", "op", "bound groups", "exact"]
# Assumed step times; fewer for large graphs, on which each takes long and gains little.
_HALVINGS = 2
_HALVED_TASKS = 50_000


@dataclass(frozen=True)
class LowerBound:
    """Lower bounds on the step time of placements that fit, and on memory.

    Attributes:
        critical_path_ns: Longest chain of ops, each on the allowed device that is best for it;
            what must cross a link, or wait for another op of its device, is counted.
        load_ns: Work shared out perfectly over all devices, each op in the best possible mix.
        combined_ns: Best of `head + load of the ops in between + tail` over cuts of the graph,
            of work where memory forces it to be spread, and of both where some devices are too
            slow for some ops; never below the two others.
        static_bytes: Bytes that must be somewhere when the step begins (parameters, state, inputs).
        capacity_bytes: Memory of all usable devices together.
        lack: Why it is proved that no placement fits: `static` (all devices together are too
            small), `op` (an op or group fits nowhere), `bound groups` (groups that may only go to
            some devices are too much for these), `exact` (a placer proved it); else empty.
        proved_ns: What an exact placer proved on top of that.
        batch_ns: The least that copies of the batch take, before the ops begin.
    """

    critical_path_ns: int
    load_ns: int
    combined_ns: int
    static_bytes: int
    capacity_bytes: int
    lack: Lack = ""
    proved_ns: int = 0
    batch_ns: int = 0

    @property
    def step_ns(self) -> int:
        """The largest of the time bounds, after the copies of the batch."""
        ops_ns = max(self.critical_path_ns, self.load_ns, self.combined_ns)
        return max(self.batch_ns + ops_ns, self.proved_ns)

    @property
    def is_infeasible(self) -> bool:
        """Whether it is proved that no placement fits."""
        return bool(self.lack)

    def gap(self, step_ns: int) -> float:
        """How far a step is above the bound: step / bound - 1."""
        return gap(step_ns, self.step_ns)

    def status(self, step_ns: int, fits: bool) -> Status:
        """What is known of a plan with this step time, under the costs of the problem.

        `optimal`: it fits, and no plan that fits is faster (proved: the step meets the bound).
        `feasible`: it fits; a faster one may exist. `infeasible`: it does not fit, and proved is
        that nothing does. `unknown`: it does not fit, and whether anything does is open.
        """
        return status(step_ns, self.step_ns, fits, self.is_infeasible)


def gap(value_ns: int, bound_ns: int) -> float:
    """How far a value is above its bound: value / bound - 1; 0 where nothing is known."""
    return value_ns / bound_ns - 1 if bound_ns else 0.0


def status(value_ns: int, bound_ns: int, fits: bool, is_infeasible: bool) -> Status:
    """As `LowerBound.status`, of any value and its bound."""
    if fits:
        return "optimal" if value_ns <= bound_ns else "feasible"
    return "infeasible" if is_infeasible else "unknown"


def lower_bound(problem: Problem) -> LowerBound:
    """Bounds from paths, load, memory, and their combinations.

    Devices on which an op, or its group, cannot fit are left out. Then a step of some length is
    assumed, and ops are taken off devices where they would make it longer; if the bounds of what is
    left still exceed it, no step is that short. The best such length is found by halving.

    Complexity: O(K^2 E + 600 N K) with numpy; 0.4 s for 12,000 tasks and 5 devices, about 6
        seconds for 200,000. `K` is kinds of devices, at most 4.
    """
    needs = least_needs(problem)
    lack = needs.lack
    allowed = problem.allowed if lack else needs.allowed
    if not problem.core.tasks.num_tasks:
        return LowerBound(0, 0, 0, needs.total_bytes, needs.capacity_bytes, lack)
    paths = communication_paths(problem, allowed)
    shares = _Shares(problem, allowed, paths, needs)
    load = shares.load()
    best = max(paths.longest_ns, load, shares.bound(NEVER, bool(lack)))
    return LowerBound(
        critical_path_ns=paths.longest_ns,
        load_ns=load,
        combined_ns=shares.raise_bound(best, bool(lack)),
        static_bytes=needs.total_bytes,
        capacity_bytes=needs.capacity_bytes,
        lack=lack,
        batch_ns=least_batch_ns(problem, allowed),
    )


def least_batch_ns(problem: Problem, allowed: Bools) -> int:
    """Time that copies of the batch take at least: each input goes where it is read, and so to one
    of the devices of whichever reader has the dearest choice.

    Args:
        problem: What is placed.
        allowed: Devices each group may go to. `[G, D]`
    """
    tasks, copy_ns = problem.core.tasks, problem.core.transfers.copy_ns
    total = 0
    for const, users in problem.core.copied():
        rows = np.unique(allowed[tasks.group[users]], axis=0)
        total += max((int(copy_ns[const, row].min()) for row in rows if row.any()), default=0)
    return total


class _Shares:
    """Work of tasks and of groups on every kind of device, as far as a step's length allows."""

    def __init__(self, problem: Problem, allowed: Bools, paths: Paths, needs: Needs) -> None:
        tasks, kinds = problem.core.tasks, paths.kinds
        count = len(kinds.streams)
        self._needs, self._group, self._streams = needs, tasks.group, kinds.streams
        self._allowed = np.zeros((tasks.num_groups, count), bool)
        self._room = np.zeros(count)
        most = np.zeros(count)
        for d in problem.usable_devices:
            k = kinds.of_device[d]
            self._allowed[:, k] |= allowed[:, d]
            self._room[k] += needs.room_bytes[d]
            most[k] = max(most[k], problem.core.wires.streams[d])
        self._most_streams = most
        self._duration = np.ascontiguousarray(kinds.duration_ns.T)
        self._time = self._duration.astype(np.float64)
        self._through = (paths.head_ns + paths.tail_ns).T + self._duration
        self._head, self._tail = paths.head_ns.min(axis=0), paths.tail_ns.min(axis=0)
        columns = [np.bincount(tasks.group, column, tasks.num_groups) for column in self._time.T]
        self._group_time = np.stack(columns, axis=1)

    def load(self) -> int:
        """The load of all groups."""
        share = np.where(self._allowed, self._group_time / self._streams[None, :], np.inf)
        share = _finite(share)
        return _round_up(float((share * dual_weights(share)[None, :]).min(axis=1).sum()))

    def bound(self, step_ns: int, is_lacking: bool) -> int:
        """A lower bound for steps of at most `step_ns`; `NEVER` if there is none."""
        allowed = self._fitting(step_ns)
        if not allowed.any(axis=1).all():
            return NEVER
        streams = self._streams[None, :]
        by_task = _finite(np.where(allowed[self._group], self._time / streams, np.inf))
        best = window_bound(self._head, self._tail, by_task, self._streams)
        if not is_lacking:
            time = np.where(allowed, self._group_time, np.inf)
            held = self._needs.static_bytes
            best = max(best, memory_load(time, self._streams, held, self._room))
        return _round_up(best)

    def raise_bound(self, best: int, is_lacking: bool) -> int:
        """The largest step time found too short by its own bound."""
        low, high = best, 2 * best
        if np.array_equal(self._fitting(low), self._fitting(NEVER)):
            return low
        for _ in range(min(_HALVINGS, _HALVED_TASKS // len(self._head))):
            middle = (low + high) // 2
            if self.bound(middle, is_lacking) > middle:
                low = middle + 1
            else:
                high = middle
        return low

    def _fitting(self, step_ns: int) -> Bools:
        """Devices on which a group makes no step longer than that. `[G, D]`"""
        allowed = self._allowed & (self._group_time <= float(step_ns) * self._most_streams[None, :])
        task, kind = np.nonzero(self._through > step_ns)
        allowed[self._group[task], kind] = False
        return allowed


def _finite(share: F64) -> F64:
    """Large numbers for devices that are not allowed: infinity times a weight of 0 is no number."""
    rows = share.copy()
    finite = np.isfinite(rows)
    most = float(rows[finite].sum()) + 1.0 if finite.any() else 1.0
    rows[~finite] = most * 1e6
    return rows


def _round_up(value: float) -> int:
    """Smallest integer not clearly below `value`: floating sums may be a hair too large."""
    return int(np.ceil(value * (1 - 1e-12) - 1e-6))
