"""The critical-path family: partition first, with the longest path in view."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from devplace.errors import InputError
from devplace.placers.colocation_groups import I32, legal
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.list_schedulers.list_schedule import (
    ListSchedule,
    mean_transfer_ns,
    upward_rank,
)
from devplace.problem import Placement, Problem

Variant = Literal["critical-path", "mite", "dfs", "hash"]
VARIANTS: tuple[Variant, ...] = ("critical-path", "mite", "dfs", "hash")


@dataclass(frozen=True)
class Mayer:
    """A partition that favours the critical path; the order on each device is by longest path to
    the end of the step, as for all placers (PCT of the paper).

    Variants:

    - `critical-path`: the whole longest path goes to the fastest accelerator, the rest as in `dfs`.
    - `mite`: ops in topological order, each to the device with the smallest
      `memory * importance * traffic * execution time`.
    - `dfs`: ops along paths, the longest first, each to the device with the smallest
      `traffic * execution time`.
    - `hash`: a device by the hash of the op's name, weighted with the devices' speeds.

    Each factor is 1 at best: memory is 1 + the used part of the device's limit; importance is 1 +
    the op's part of the longest path times how much slower than the fastest the device runs it;
    traffic is 1 + the time to fetch inputs over the op's mean time; execution time is the
    time of all ops there with this one, over the mean of that on all accelerators. A device without
    room is passed over.

    Source: Mayer, Mayer, Laich (2017), The TensorFlow partitioning and scheduling problem: it's the
    critical path!, arXiv 1711.01912, sections 3 and 4. Differs from it: which factors make the
    scores is the paper's, but how each is measured, and where `critical-path` puts other ops, is
    ours; execution time counts the device's earlier ops, or all would go to one device; batch
    split, and the schedulers FIFO and MSR, are left out. The paper finds those strategies best that
    shorten the critical path; `critical-path` is also the best of the four on most of this
    package's workloads on four equal cards, so it is the default.

    Attributes:
        variant: Which partition.

    Raises:
        InputError: Another variant.
    """

    name: str = "mayer"
    variant: Variant = "critical-path"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise InputError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}.")

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Place every op once. O(N D + N log N)."""
        if self.variant == "hash":
            return Placement(problem.spaces.op_devices_of_groups(legal(problem, _hashed(problem))))
        partition = _Partition(problem)
        if self.variant == "critical-path":
            for task in partition.longest_path():
                partition.put_on_fastest(task)
        order = range(len(partition.rank)) if self.variant == "mite" else partition.along_paths()
        for task in order:
            partition.put(task, self.variant == "mite")
        return partition.placement()


def _hashed(problem: Problem) -> I32:
    """Device of each group by the name of its first op. `[G]`"""
    tasks = problem.core.tasks
    devices = problem.accelerators
    time = problem.core.wires.duration_ns[:, devices].sum(axis=0).astype(float)
    speed = 1 / time if time.all() else np.ones(len(devices))
    upto = np.cumsum(speed) / speed.sum()
    wish = np.zeros(tasks.num_groups, np.int32)
    for task in range(tasks.num_tasks - 1, -1, -1):
        name = problem.graph.ops[tasks.task_op[task]].name
        drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
        at = min(int(np.searchsorted(upto, drawn, side="right")), len(devices) - 1)
        wish[tasks.group[task]] = devices[at]
    return wish


class _Partition:
    """Ops placed so far; a schedule without times keeps groups, memory and what is where."""

    def __init__(self, problem: Problem) -> None:
        self._devices = problem.accelerators
        self._schedule = ListSchedule(problem, contention=False)
        self._transfer = mean_transfer_ns(problem, self._devices).tolist()
        self._tasks = problem.core.tasks
        self.rank = upward_rank(problem, self._devices)
        self._work: NDArray[np.float64] = np.zeros(len(problem.machine.devices))
        self._done = [False] * len(self.rank)
        self._total = problem.core.wires.duration_ns.sum(axis=0).tolist()
        self._limit = [max(1, limit) for limit in problem.limit_bytes]

    def longest_path(self) -> list[int]:
        """Ops of the path that decides how long the step takes at least."""
        ready = [task for task in range(len(self.rank)) if not self._schedule.is_source[task]]
        path: list[int] = []
        while ready:
            path.append(max(ready, key=lambda task: (self.rank[task], -task)))
            ready = list(self._schedule.readers(path[-1]))
        return path

    def along_paths(self) -> list[int]:
        """Ops depth first, of several readers the one with the longest path first, each when all
        ops before it are in the list."""
        missing = [
            sum(not self._schedule.is_source[m] for m in self._schedule.makers(task))
            for task in range(len(self.rank))
        ]
        stack = [t for t, left in enumerate(missing) if not left]
        stack.sort(key=lambda task: (self.rank[task], -task))
        found = []
        while stack:
            task = stack.pop()
            if self._schedule.is_source[task]:
                continue
            found.append(task)
            free = []
            for reader in self._schedule.readers(task):
                missing[reader] -= 1
                if missing[reader] == 0:
                    free.append(reader)
            stack += sorted(free, key=lambda reader: (self.rank[reader], -reader))
        return found

    def put_on_fastest(self, task: int) -> None:
        """Place an op on the accelerator that runs the whole step fastest, if it has room."""
        choices = self._choices(task)
        self._commit(task, min(choices, key=lambda device: (self._total[device], device)))

    def put(self, task: int, is_mite: bool) -> None:
        """Place an op, if it is not yet, where its score is smallest."""
        if self._done[task] or self._schedule.is_source[task]:
            return
        choices = self._choices(task)
        if len(choices) > 1:
            scores = [(self._score(task, d, choices, is_mite), d) for d in choices]
            choices = [min(scores)[1]]
        self._commit(task, choices[0])

    def _choices(self, task: int) -> list[int]:
        choices = self._schedule.choices(task, set(self._devices))
        return [d for d in choices if self._schedule.has_room(task, d)] or choices

    def _score(self, task: int, device: int, choices: list[int], is_mite: bool) -> float:
        schedule, duration = self._schedule, self._schedule.duration[task]
        mean = max(1.0, sum(duration[d] for d in choices) / len(choices))
        loads = [self._work[d] + duration[d] for d in choices]
        load = self._work[device] + duration[device]
        score = (1 + self._fetch_ns(task, device) / mean) * load / max(1.0, sum(loads) / len(loads))
        if is_mite:
            used = schedule.ledger.used[device] + schedule.ledger.need(task, device)
            fastest = max(1, min(duration[d] for d in choices))
            importance = self.rank[task] / max(1.0, float(self.rank.max()))
            score *= 1 + used / self._limit[device]
            score *= 1 + importance * (duration[device] / fastest - 1)
        return float(score)

    def _fetch_ns(self, task: int, device: int) -> float:
        """Time to fetch what is on other devices."""
        tasks, schedule = self._tasks, self._schedule
        total = 0.0
        for carrier in tasks.in_carrier[tasks.in_ptr[task] : tasks.in_ptr[task + 1]].tolist():
            home = schedule.group_device[schedule.group[tasks.carrier_maker[carrier]]]
            if home not in (-1, device):
                total += self._transfer[carrier]
        return total

    def _commit(self, task: int, device: int) -> None:
        self._done[task] = True
        self._schedule.commit(task, device)
        self._work[device] += self._schedule.duration[task][device]

    def placement(self) -> Placement:
        """The finished placement."""
        return self._schedule.placement()
