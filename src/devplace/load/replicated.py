"""Pipeline stages with replicas, as PipeDream plans them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.load.downsets import Downsets, make_downsets
from devplace.load.problem import I32, I64
from devplace.load.solve import NEVER

PS_PER_S = 10**12
MAX_DOWNSETS = 6000  # pairs of them are tried: some seconds


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

    Raises:
        ProblemError: Shapes or ranges do not fit together.

    Source: Narayanan et al. (2019), "PipeDream", SOSP, section 3.1. Differs from its planner in:
    all down-sets are places to cut; one level of devices; no memory limit (off there too).
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

    def __post_init__(self) -> None:
        kinds = {"work_ps": np.int64, "activation_bytes": np.int64, "parameter_bytes": np.int64}
        for name in kinds:
            array = np.ascontiguousarray(getattr(self, name), np.int64)
            if array.shape != (len(self.work_ps),) or (array < 0).any():
                raise ProblemError(f"{name} must have one value of at least 0 for each node.")
            object.__setattr__(self, name, array)
        for name in ("edge_src", "edge_dst"):
            array = np.ascontiguousarray(getattr(self, name), np.int32)
            if len(array) and not 0 <= array.min() <= array.max() < len(self.work_ps):
                raise ProblemError(f"{name} must name nodes 0 to {len(self.work_ps) - 1}.")
            object.__setattr__(self, name, array)
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
    """Time per sample of stages with these sums, ps, rounded up."""
    sync = 4.0 * (replicas - 1) * parameters / (replicas * problem.bandwidth) * PS_PER_S
    times: I64 = np.ceil((work + np.rint(sync)) / replicas).astype(np.int64)
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


def solve_replicated(problem: ReplicatedProblem, max_downsets: int = MAX_DOWNSETS) -> StageSolution:
    """Best stages and replicas, by a dynamic programme over down-sets and devices.

    Raises:
        ProblemError: The graph has a cycle.
    """
    began = time.monotonic()
    downsets = make_downsets(len(problem.work_ps), problem.edge_src, problem.edge_dst, max_downsets)
    value, came = _programme(problem, downsets)
    last = len(downsets.members) - 1
    used = int(np.argmin(value[last]))
    stage = np.zeros(len(problem.work_ps), np.int32)
    cuts: list[tuple[int, int]] = []
    at, left = last, used
    while at > 0:
        before, replicas = (int(x) for x in came[at, left])
        cuts.append((at, replicas))
        at, left = before, left - replicas
    cuts.reverse()
    for s, (cut, _) in reversed(list(enumerate(cuts))):
        stage[downsets.members[cut]] = s
    replicas_of = np.array([m for _, m in cuts], np.int32)
    best = int(value[last, used])
    work = np.array([problem.work_ps[stage == s].sum() for s in range(len(cuts))], np.int64)
    parameters = np.array(
        [problem.parameter_bytes[stage == s].sum() for s in range(len(cuts))], np.int64
    )
    times = [
        int(stage_times(problem, work[s : s + 1], parameters[s : s + 1], int(m))[0])
        for s, m in enumerate(replicas_of)
    ]
    bound = best if downsets.complete else -(-int(problem.work_ps.sum()) // problem.num_devices)
    return StageSolution(
        stage,
        replicas_of,
        np.array(times, np.int64),
        work,
        best,
        bound,
        "optimal" if best == bound else "feasible",
        time.monotonic() - began,
    )


def _programme(problem: ReplicatedProblem, downsets: Downsets) -> tuple[I64, NDArray[np.int64]]:
    """Value of each down-set on each number of devices `[I, k + 1]`, and where it came from."""
    count, k = len(downsets.members), problem.num_devices
    members = downsets.members.astype(np.int64)
    work, parameters = members @ problem.work_ps, members @ problem.parameter_bytes
    moved = _moved(problem, downsets.members)
    value = np.full((count, k + 1), NEVER, np.int64)
    came = np.zeros((count, k + 1, 2), np.int64)
    value[0, 0] = 0
    for at in range(1, count):
        below = downsets.below(at)
        for m in range(1, 2 if problem.straight else k + 1):
            stage = stage_times(
                problem, work[at] - work[below], parameters[at] - parameters[below], m
            )
            if problem.count_transfers:
                stage = np.maximum(stage, _transfer(problem, moved[below], m))
                stage = np.maximum(stage, _transfer(problem, moved[at : at + 1], m))
            for used in range(m, k + 1):
                options = np.maximum(value[below, used - m], stage)
                best = int(np.argmin(options))
                if options[best] < value[at, used]:
                    value[at, used] = options[best]
                    came[at, used] = below[best], m
    return value, came


def _moved(problem: ReplicatedProblem, members: NDArray[np.bool_]) -> I64:
    """Bytes that cross each cut: outputs inside that are read outside. `[I]`"""
    crosses = np.zeros(members.shape, np.bool_)
    for a, b in zip(problem.edge_src.tolist(), problem.edge_dst.tolist(), strict=True):
        crosses[:, a] |= members[:, a] & ~members[:, b]
    moved: I64 = crosses.astype(np.int64) @ problem.activation_bytes
    return moved


def _transfer(problem: ReplicatedProblem, moved: I64, replicas: int) -> I64:
    times: I64 = np.ceil(2.0 * moved / (problem.bandwidth * replicas) * PS_PER_S).astype(np.int64)
    return times
