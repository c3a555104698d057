"""Pipeline stages with replicas, as PipeDream plans them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.pipelining.downsets import Downsets, make_downsets
from devplace.pipelining.load_problem import I32, I64
from devplace.pipelining.solve import NEVER

PS_PER_S = 10**12
MAX_DOWNSETS = 6000  # pairs of them are tried: some seconds
MAX_PS = 2.0**60  # 13 days; one stage on one device takes less
FEWEST_DOWNSETS = 300
STEPS_PER_S = 1e8  # entries of the programme, on one core of 2020
STEPS_PER_TURN = 5000  # what a row and a number of replicas cost, however few entries


@dataclass(frozen=True, eq=False)
class ReplicatedProblem:
    """Cut a graph into consecutive stages and replicate stages over equal devices.

    A stage with work `W`, parameters `P` bytes and `m` replicas takes `(W + sync) / m` per sample,
    with `sync = 4 (m - 1) P / (m * bandwidth)`. The value is the largest stage time. With
    `count_transfers`, a cut that moves `A` bytes forward and as many back takes
    `2 A / (m * bandwidth)` on either side, overlapped with work, and counts in the largest too.

    Attributes:
        work_ps: Forward and backward time of each node. `[N]`
        activation_bytes: Output of each node. `[N]`
        parameter_bytes: `[N]`
        edge_src, edge_dst: `[E]`
        num_devices: Devices, all alike; all of them may be used, none must be.
        bandwidth: Bytes per second between devices.
        count_transfers: Whether moved activations count. PipeDream's planner leaves them out
            unless a compression ratio is given.
        straight: Without replicas.
        held_bytes: What one copy of a node holds, or None: memory is unlimited. A stage of `m`
            replicas has `ceil(devices of later stages / m)` copies. `[N]`
        memory_bytes: Limit of each device, with `held_bytes`.

    Raises:
        ProblemError: Shapes or ranges do not fit together.

    Source: Narayanan et al. (2019), "PipeDream", SOSP, section 3.1. Differs from its planner in:
    all down-sets are places to cut; one level of devices; copies are counted by the devices that
    later stages use, not by those that are left for them.
    """

    work_ps: I64
    activation_bytes: I64
    parameter_bytes: I64
    edge_src: I32
    edge_dst: I32
    num_devices: int
    bandwidth: float
    count_transfers: bool = False
    straight: bool = False
    held_bytes: I64 | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        names = ["work_ps", "activation_bytes", "parameter_bytes"]
        for name in names if self.held_bytes is None else [*names, "held_bytes"]:
            array = np.ascontiguousarray(getattr(self, name), np.int64)
            if array.shape != (len(self.work_ps),) or (array < 0).any():
                raise ProblemError(f"{name} must have one value of at least 0 for each node.")
            object.__setattr__(self, name, array)
        for name in ("edge_src", "edge_dst"):
            array = np.ascontiguousarray(getattr(self, name), np.int32)
            if len(array) and not 0 <= array.min() <= array.max() < len(self.work_ps):
                raise ProblemError(f"{name} must name nodes 0 to {len(self.work_ps) - 1}.")
            object.__setattr__(self, name, array)
        if int(self.work_ps.sum(dtype=object) if len(self.work_ps) else 0) >= MAX_PS:
            raise ProblemError("work_ps must sum to less than 2^60. Use a coarser unit.")
        if (self.held_bytes is None) != (self.memory_bytes is None):
            raise ProblemError("held_bytes and memory_bytes need each other. Give both or none.")
        if self.num_devices < 1 or not self.bandwidth > 0:
            raise ProblemError(
                f"Replicated stages need a device and a bandwidth, got {self.num_devices} devices "
                f"and {self.bandwidth} bytes/s."
            )


@dataclass(frozen=True, eq=False)
class StageSolution:
    """Stages in pipeline order.

    Attributes:
        stage: Stage of each node. `[N]`
        replicas: Replicas of each stage. `[S]`
        stage_ps: Time per sample of each stage. `[S]`
        work_ps: Work of each stage, before it is divided by its replicas. `[S]`
        value_ps: Largest of the stage times, and of the transfers where they count.
        bound_ps: The value if all places to cut were tried, else what work alone needs.
        status: `optimal` or `feasible`.
        seconds: Time taken.
    """

    stage: I32
    replicas: I32
    stage_ps: I64
    work_ps: I64
    value_ps: int
    bound_ps: int
    status: str
    seconds: float


def stage_times(problem: ReplicatedProblem, work: I64, parameters: I64, replicas: int) -> I64:
    """Time per sample of stages with these sums, ps, rounded up; at most 2^60."""
    sync = 4.0 * (replicas - 1) * parameters / (replicas * problem.bandwidth) * PS_PER_S
    times: I64 = np.ceil(np.minimum((work + np.rint(sync)) / replicas, MAX_PS)).astype(np.int64)
    return times


def evaluate_stages(problem: ReplicatedProblem, stage: I32, replicas: I32) -> int:
    """Value of stages given node by node, ps.

    Raises:
        ProblemError: Too many replicas, or an edge that goes back to an earlier stage.
    """
    if int(np.sum(replicas)) > problem.num_devices:
        raise ProblemError(
            f"The stages use {int(np.sum(replicas))} devices, there are {problem.num_devices}."
        )
    if (stage[problem.edge_src] > stage[problem.edge_dst]).any():
        raise ProblemError("An edge goes back to an earlier stage.")
    value = 0
    for s, m in enumerate(replicas.tolist()):
        held = stage == s
        times = stage_times(
            problem, problem.work_ps[held].sum()[None], problem.parameter_bytes[held].sum()[None], m
        )
        value = max(value, int(times[0]))
        if problem.count_transfers:
            for upto in (s - 1, s):
                moved = _moved(problem, (stage <= upto)[None])
                value = max(value, int(_transfer(problem, moved, m)[0]))
    return value


def solve_replicated(
    problem: ReplicatedProblem, max_downsets: int = MAX_DOWNSETS, seconds: float = 60.0
) -> StageSolution:
    """Best stages and replicas, by a dynamic programme over down-sets and devices.

    Where that would take longer than `seconds`, as counted from its size, fewer places to cut are
    tried, then replicas are counted in groups of devices; the status is then `feasible` unless the
    value meets the bound.

    Raises:
        ProblemError: The graph has a cycle.
    """
    began = time.monotonic()
    downsets, group = _places(problem, max_downsets, seconds)
    value, came = _programme(problem, downsets, group)
    last = len(downsets.members) - 1
    used = int(np.argmin(value[0]))
    alone = int(problem.work_ps.sum())  # on one device, which groups of several leave out
    best = min(alone, int(value[0, used]))
    stage = np.zeros(len(problem.work_ps), np.int32)
    replicas = [1] if alone < value[0, used] else []
    at, left = (last, 0) if replicas else (0, used)
    while at < last:
        upto, m = (int(x) for x in came[at, left])
        stage[downsets.members[upto] & ~downsets.members[at]] = len(replicas)
        replicas.append(m * group)
        at, left = upto, left - m
    rows = range(len(replicas))
    work = np.array([problem.work_ps[stage == s].sum() for s in rows], np.int64)
    parameters = np.array([problem.parameter_bytes[stage == s].sum() for s in rows], np.int64)
    times = [
        int(stage_times(problem, work[s : s + 1], parameters[s : s + 1], m)[0])
        for s, m in enumerate(replicas)
    ]
    is_sure = downsets.complete and group == 1
    bound = best if is_sure else -(-int(problem.work_ps.sum()) // problem.num_devices)
    return StageSolution(
        stage,
        np.array(replicas, np.int32),
        np.array(times, np.int64),
        work,
        best,
        bound,
        "optimal" if best == bound else "feasible",
        time.monotonic() - began,
    )


def _places(problem: ReplicatedProblem, most: int, seconds: float) -> tuple[Downsets, int]:
    """Places to cut, and how many devices are handed out at once, for a programme in time."""
    k, count = problem.num_devices, len(problem.work_ps)

    def is_too_much(rows: int, k: int) -> bool:
        turns = 1 if problem.straight else k
        shares = k if problem.straight else k**2 / 2
        steps = rows**2 / 2 * (shares + count / 16) + STEPS_PER_TURN * rows * turns
        return steps > seconds * STEPS_PER_S

    rows = most
    least = min(count + 1, FEWEST_DOWNSETS)
    while rows > least and is_too_much(rows, k):
        rows = max(least, rows * 4 // 5)
    sets = make_downsets(count, problem.edge_src, problem.edge_dst, rows)
    group = 1
    while not problem.straight and 2 * group <= k and is_too_much(len(sets.members), k // group):
        group *= 2
    return sets, group


def _programme(
    problem: ReplicatedProblem, downsets: Downsets, group: int
) -> tuple[I64, NDArray[np.int64]]:
    """Value of what lies outside each down-set on each number of groups of devices `[I, k + 1]`,
    and the stage it begins with; from the last stage to the first, for memory depends on the later
    ones."""
    count, k = len(downsets.members), problem.num_devices // group
    members = downsets.members.astype(np.int64)
    work, parameters = members @ problem.work_ps, members @ problem.parameter_bytes
    held = None if problem.held_bytes is None else members @ problem.held_bytes
    moved = _moved(problem, downsets.members)
    value = np.full((count, k + 1), NEVER, np.int64)
    came = np.zeros((count, k + 1, 2), np.int64)
    value[-1, 0] = 0
    for at in range(count - 2, -1, -1):
        above = downsets.above(at)
        for m in range(1, 2 if problem.straight else k + 1):
            stage = stage_times(
                problem, work[above] - work[at], parameters[above] - parameters[at], m * group
            )
            if problem.count_transfers:
                stage = np.maximum(stage, _transfer(problem, moved[above], m * group))
                stage = np.maximum(stage, _transfer(problem, moved[at : at + 1], m * group))
            options = np.maximum(value[above, : k + 1 - m], stage[:, None])
            if held is not None and problem.memory_bytes is not None:
                copies = -(-np.arange(k + 1 - m) // m)
                room = problem.memory_bytes // np.maximum(1, copies)
                full = (held[above] - held[at])[:, None] > room[None, :]
                options[full & (copies > 0)[None, :]] = NEVER
            best = np.argmin(options, axis=0)
            least = options[best, np.arange(len(best))]
            here, better = value[at, m:], least < value[at, m:]
            here[better] = least[better]
            came[at, m:, 0][better] = above[best[better]]
            came[at, m:, 1][better] = m
    return value, came


def _moved(problem: ReplicatedProblem, members: NDArray[np.bool_]) -> I64:
    """Bytes that cross each cut: outputs inside that are read outside. `[I]`"""
    crosses = np.zeros(members.shape, np.bool_)
    for a, b in zip(problem.edge_src.tolist(), problem.edge_dst.tolist(), strict=True):
        crosses[:, a] |= members[:, a] & ~members[:, b]
    moved: I64 = crosses.astype(np.int64) @ problem.activation_bytes
    return moved


def _transfer(problem: ReplicatedProblem, moved: I64, replicas: int) -> I64:
    exact = 2.0 * moved / (problem.bandwidth * replicas) * PS_PER_S
    times: I64 = np.ceil(np.minimum(exact, MAX_PS)).astype(np.int64)
    return times
