"""What devplace's own policy sees: numbers that mean the same on every graph and machine.

Times are parts of the whole step on the best single device, bytes parts of memory limits. In
shapes, `M` is groups, `A` devices to choose from, `B` samples, `K` bins of time, `C` kinds of link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.rl.environment import Environment
from devplace.placers.rl.features import group_bytes, group_costs
from devplace.placers.rl.sized_groups import edge_ns
from devplace.problem import Problem

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
BOOL = NDArray[np.bool_]

BINS = 16
GROUP_FEATURES = 12 + BINS
PAIR_FEATURES = 16
PROBLEM_FEATURES = 12
QUEUE, TRAFFIC = 0, 1
"""Columns of pair features that a list scheduler goes by; see `Scene.pairs`."""


class Scene:
    """One problem as a policy sees it, whatever its size.

    Args:
        environment: Where placements of its groups are scored.

    Attributes:
        time: Time of each group on each device. `[M, A]`
        groups: What is known of each group before anything is placed. `[M, GROUP_FEATURES]`
        summary: What is known of graph and machine as a whole. `[PROBLEM_FEATURES]`
        edges: Between groups, int64 `[2, E]`; `weights`: their traffic, scaled to a sum of 1 over
            all that enters (row 0) or leaves (row 1) a group. `[2, E]`
        allowed: Devices each group may go to. bool `[M, A]`
    """

    def __init__(self, environment: Environment) -> None:
        grouping, problem = environment.grouping, environment.problem
        devices = environment.devices
        self.allowed = environment.allowed
        self.num_groups, self.num_devices = self.allowed.shape
        costs = group_costs(grouping)[:, devices]
        whole = costs.sum(axis=0)
        self._unit = max(1.0, float(whole.min()))
        self.time = costs / self._unit
        limits = np.array([max(1, problem.limit_bytes[d]) for d in devices], np.float64)
        kept = _kept_bytes(environment)
        self._kept = kept[:, None] / limits
        made = _summed(grouping.of_task, problem.core.tasks.made_bytes, self.num_groups)
        self._made = np.maximum(made, kept)[:, None] / limits
        self.edges, sent = edge_ns(grouping)
        self._sent = sent / self._unit
        self._class = problem.core.wires.link_class[np.ix_(devices, devices)]
        self._speed = whole.min() / np.maximum(whole, 1.0)
        self._is_cpu = np.array([problem.machine.devices[d].kind == "cpu" for d in devices], float)
        self._levels(environment)
        mean = self._sent.mean(axis=0)
        into: F64 = np.bincount(self.edges[1], mean, self.num_groups).astype(np.float64)
        out: F64 = np.bincount(self.edges[0], mean, self.num_groups).astype(np.float64)
        self.weights = np.stack(
            [
                mean / np.maximum(into[self.edges[1]], 1e-12),
                mean / np.maximum(out[self.edges[0]], 1e-12),
            ]
        ).astype(np.float32)
        self.groups = self._group_rows(environment, into, out)
        self.summary = self._problem_row(environment)
        self._near = [self._neighbours(group) for group in range(self.num_groups)]

    def _levels(self, environment: Environment) -> None:
        """When work could run if there were devices without end: profiles over time. `[M, K]`"""
        problem, of_task = environment.problem, environment.grouping.of_task
        duration = problem.core.wires.duration_ns[:, environment.devices].min(axis=1).astype(float)
        start = earliest_starts(problem, duration)
        end = start + duration
        self._path = max(float(end.max(initial=0.0)), 1.0)
        middle = np.minimum((start + duration / 2) / self._path * BINS, BINS - 1).astype(np.int64)
        cells = np.bincount(of_task * BINS + middle, duration, self.num_groups * BINS)
        self._profile = cells.reshape(self.num_groups, BINS) / self._unit
        self._bin = self._path / self._unit / BINS
        self._begin = np.full(self.num_groups, np.inf)
        np.minimum.at(self._begin, of_task, start / self._path)
        self._end = np.zeros(self.num_groups)
        np.maximum.at(self._end, of_task, end / self._path)

    def _group_rows(self, environment: Environment, into: F64, out: F64) -> F32:
        count, problem = self.num_groups, environment.problem
        stages = np.array([problem.graph.ops[op].stage for op in problem.core.tasks.task_op])
        of_task = environment.grouping.of_task
        size = np.bincount(of_task, minlength=count)
        parts = [np.bincount(of_task, stages == s, count) / size for s in ("forward", "backward")]
        best = self.time.min(axis=1)
        rows = [
            best * count,
            np.log10(best + 1e-6) + 3,
            np.log10(into + 1e-6) + 3,
            np.log10(out + 1e-6) + 3,
            np.log10(self._kept.min(axis=1) + 1e-6) + 3,
            self._begin,
            self._end,
            *parts,
            np.full(count, self._path / self._unit),
            np.full(count, np.log10(self._sent.mean(axis=0).sum() + 1e-6)),
            np.full(count, self._made.sum(axis=0).min()),
        ]
        rows += list((self._profile / np.maximum(best, 1e-12)[:, None]).T)
        found: F32 = np.clip(np.stack(rows, axis=1), -5, 5).astype(np.float32)
        return found

    def _problem_row(self, environment: Environment) -> F32:
        """Groups, colocation groups, tasks (logarithms); devices, part of them that are CPUs, the
        slowest one's speed; transfers if all were sent, and those of an edge beside the work of a
        group (logarithms); the longest path; the largest group; memory kept and made."""
        tasks, sent = environment.problem.core.tasks, self._sent.mean(axis=0)
        best = self.time.min(axis=1)
        each = float(sent.mean()) / max(1e-12, float(best.mean())) if len(sent) else 0.0
        row = (
            np.log10(max(1, self.num_groups)),
            np.log10(max(1, tasks.num_groups)),
            np.log10(max(1, tasks.num_tasks)),
            self.num_devices / 8,
            float(self._is_cpu.mean()),
            float(self._speed.min()),
            np.log10(float(sent.sum()) + 1e-6),
            np.log10(each + 1e-6),
            self._path / self._unit,
            float(best.max(initial=0.0)),
            float(self._kept.sum(axis=0).min()),
            float(self._made.sum(axis=0).min()),
        )
        found: F32 = np.clip(np.array(row), -5, 5).astype(np.float32)
        return found

    def _neighbours(self, group: int) -> tuple[I64, I64]:
        """Groups placed earlier that exchange with this one, and the edges to them."""
        ends, others = np.concatenate([self.edges, self.edges[::-1]], axis=1)
        mine = np.flatnonzero((ends == group) & (others < group))
        return others[mine], mine % self.edges.shape[1]

    def begin(self, count: int) -> Progress:
        """Nothing placed yet, in so many samples."""
        shape = (count, self.num_devices)
        return Progress(
            np.zeros((count, self.num_groups), np.int64),
            np.zeros((*shape, BINS)),
            np.zeros(shape),
            np.zeros(shape),
        )

    def pairs(self, progress: Progress, group: int) -> tuple[F32, BOOL]:
        """What is known of putting this group on each device, and which devices it may go to.

        Columns: work that would have to queue (more at a time than a device can do); time of
        transfers to and from what is placed; both less the least of any device; own time here; its
        logarithm; part of its traffic that stays here; load; whether nothing is here; whether the
        group before is here; memory kept and memory made, as parts of the limit, with this group;
        speed; whether it is a CPU; number of devices; part of the step that is placed.

        A device whose memory does not do for what is kept is ruled out while another is left.

        Returns:
            `[B, A, PAIR_FEATURES]`, bool `[B, A]`.
        """
        placed, load = progress.placed, progress.profile.sum(axis=2)
        count, shape = len(placed), progress.kept.shape
        slower = self.time[group] / max(1e-12, float(self.time[group].min()))
        own = self._profile[group][None, :] * slower[:, None]
        queue = np.maximum(progress.profile + own - self._bin, 0).sum(axis=2) - progress.queued(
            self._bin
        )
        near, edge = self._near[group]
        devices = placed[:, near]  # [B, n]
        kind = self._class[:, devices]  # [A, B, n]
        traffic = np.where(kind >= 0, self._sent[kind, edge], 0).sum(axis=2).T
        mean = self._sent[:, edge].mean(axis=0)
        stays = (devices[:, None, :] == np.arange(self.num_devices)[:, None]) @ mean
        kept, made = progress.kept + self._kept[group], progress.made + self._made[group]
        ok = np.broadcast_to(self.allowed[group], shape)
        fits = ok & (kept <= 1)
        may = np.where(fits.any(axis=1)[:, None], fits, ok)
        before = np.zeros(shape)
        if group:
            before[np.arange(count), placed[:, group - 1]] = 1
        per_device = (
            self.time[group],
            np.log10(self.time[group] + 1e-6) + 3,
            self._speed,
            self._is_cpu,
            np.full(self.num_devices, self.num_devices / 8),
            np.full(self.num_devices, self._before(group)),
        )
        scale = 10.0
        columns = (
            queue * scale,
            traffic * scale,
            (queue - queue.min(axis=1, keepdims=True)) * scale,
            (traffic - traffic.min(axis=1, keepdims=True)) * scale,
            stays / max(1e-12, float(mean.sum())),
            load,
            load == 0,
            before,
            kept,
            made,
            *(np.broadcast_to(row, shape) for row in per_device),
        )
        return np.clip(np.stack(columns, axis=2), -5, 5).astype(np.float32), may

    def _before(self, group: int) -> float:
        return float(self.time[:group].min(axis=1).sum() / max(1e-12, self.time.min(axis=1).sum()))

    def put(self, progress: Progress, group: int, actions: I64) -> None:
        """Place a group in every sample. `[B]`"""
        rows = np.arange(len(actions))
        slower = self.time[group] / max(1e-12, float(self.time[group].min()))
        progress.placed[:, group] = actions
        progress.profile[rows, actions] += self._profile[group] * slower[actions][:, None]
        progress.kept[rows, actions] += self._kept[group, actions]
        progress.made[rows, actions] += self._made[group, actions]


@dataclass(eq=False)
class Progress:
    """Placements under way.

    Attributes:
        placed: Device of each group, 0 while it has none. `[B, M]`
        profile: Work on each device by the time when it could run at the earliest. `[B, A, K]`
        kept: Memory for the whole step, as a part of the limit. `[B, A]`
        made: All that is made there, likewise. `[B, A]`
    """

    placed: I64
    profile: F64
    kept: F64
    made: F64

    def queued(self, per_bin: float) -> F64:
        """Work beyond what each device can do in its bin of time. `[B, A]`"""
        found: F64 = np.maximum(self.profile - per_bin, 0).sum(axis=2)
        return found


def earliest_starts(problem: Problem, duration: F64) -> F64:
    """When each task could begin with devices without end and no transfers, ns. `[N]`

    Tasks are in topological order. O(N + E).
    """
    tasks = problem.core.tasks
    maker, into = tasks.carrier_maker.tolist(), tasks.in_carrier.tolist()
    ptr, time = tasks.in_ptr.tolist(), duration.tolist()
    end = [0.0] * tasks.num_tasks
    start = [0.0] * tasks.num_tasks
    for task in range(tasks.num_tasks):
        begin = max((end[maker[c]] for c in into[ptr[task] : ptr[task + 1]]), default=0.0)
        start[task], end[task] = begin, begin + time[task]
    return np.array(start)


def _kept_bytes(environment: Environment) -> I64:
    """Bytes of each group for the whole step; a source that is replaced counts once. `[M]`"""
    grouping, tasks = environment.grouping, environment.problem.core.tasks
    old = tasks.made_bytes * (tasks.is_source > 0)
    return np.maximum(group_bytes(grouping), _summed(grouping.of_task, old, grouping.num_groups))


def _summed(of_task: NDArray[np.integer], values: I64, count: int) -> I64:
    total = np.zeros(count, np.int64)
    np.add.at(total, of_task, values)
    return total
