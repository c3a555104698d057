"""Pipeline stages with tensor and data parallelism and recomputation, as Piper plans them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.pipelining.downsets import Downsets, make_downsets
from devplace.pipelining.variants import cheapest_fit

Reals = NDArray[np.float64]
PS_PER_S = 1e12
MAX_DOWNSETS = 400  # pairs of them are tried with each kind of parallelism: about a minute
NEVER = 2**31 - 1
SECONDS_PER_PART = 25e-6  # of a node in a stage: the table has N * downsets^2 / 6 of them
_HAIR = 1e-12  # sums in another order differ by less
_MAX_ENTRIES = 3 * 10**7


@dataclass(frozen=True)
class StageVariant:
    """One way to run a node on `t` devices.

    Attributes:
        seconds_per_sample: Compute time.
        parameter_bytes: What data parallelism must synchronise.
        bytes_per_sample, fixed_bytes: Memory of `y` samples in flight: `bytes_per_sample * y +
            fixed_bytes`, on each device.
        sync_forward_bytes, sync_backward_bytes: Moved besides the edge's own bytes when the edge
            from that producer, or to that consumer, leaves the stage.
    """

    name: str
    seconds_per_sample: float
    parameter_bytes: float
    bytes_per_sample: float
    fixed_bytes: float
    sync_forward_bytes: Mapping[int, float]
    sync_backward_bytes: Mapping[int, float]


@dataclass(frozen=True, eq=False)
class TensorStageProblem:
    """Cut a graph into stages; choose for each stage `t` and `d`, and for each node a variant.

    A stage runs each of its nodes on `t` devices (a tensor-parallel degree that all its nodes
    have) and is replicated `d` times, where `d` divides the batch. Its time per sample is the sum
    over its nodes of `(work + 2 * moved / bandwidth) / d + sync / bandwidth`, where `moved` is the
    bytes of the edges that leave or enter the stage and what the variant adds to them, and `sync =
    4 (d - 1) / d * parameters / batch`. In flight are `y = ceil(s / d)` samples, `s` being the sum
    of `d` over this and all later stages. The value is the largest stage time.

    Attributes:
        variants: For each node, its variants by tensor-parallel degree. `[N]`
        edge_src, edge_dst, edge_bytes: `[E]`
        num_devices: Devices, all alike.
        memory_bytes: Limit of each.
        bandwidth: Bytes per second.
        batch: Samples (microbatches) in a batch.

    Raises:
        ProblemError: Shapes or ranges do not fit together.

    Source: Tarnawski, Narayanan, Phanishayee (2021), "Piper", NeurIPS, sections 3 and 4. Differs
    from its planner in: the value is searched for by bisection, and the devices for a value by a
    programme; among variants the greedy choice is followed by taking back what was not needed.
    """

    variants: tuple[Mapping[int, tuple[StageVariant, ...]], ...]
    edge_src: tuple[int, ...]
    edge_dst: tuple[int, ...]
    edge_bytes: tuple[float, ...]
    num_devices: int
    memory_bytes: float
    bandwidth: float
    batch: int

    def __post_init__(self) -> None:
        count = len(self.variants)
        for a, b in zip(self.edge_src, self.edge_dst, strict=True):
            if not (0 <= a < count and 0 <= b < count):
                raise ProblemError(f"Edge {a} to {b} must name nodes 0 to {count - 1}.")
        if len(self.edge_bytes) != len(self.edge_src):
            raise ProblemError("edge_bytes must have one value for each edge.")
        if self.num_devices < 1 or not self.bandwidth > 0 or self.batch < 1 or not count:
            raise ProblemError(
                "Tensor stages need nodes, a device, a bandwidth and a batch, got "
                f"{count} nodes, {self.num_devices} devices, {self.bandwidth} bytes/s, "
                f"batch {self.batch}."
            )


@dataclass(frozen=True, eq=False)
class TensorStage:
    """One stage: its nodes, degrees, the chosen variant of each node, and its time per sample."""

    nodes: tuple[int, ...]
    tensor_degree: int
    data_degree: int
    variant: tuple[str, ...]
    seconds_per_sample: float
    memory_bytes: float


@dataclass(frozen=True, eq=False)
class TensorStageSolution:
    """Stages in pipeline order; None where nothing fits. Values are seconds per sample.

    `status` is `optimal` (to a part in 10^12) where all places to cut were tried and every
    choice of variants was exact; else `feasible`, `infeasible` or `unknown`.
    """

    stages: tuple[TensorStage, ...] | None
    value_s: float | None
    bound_s: float
    status: str
    seconds: float


def solve_tensor_stages(
    problem: TensorStageProblem,
    max_downsets: int = MAX_DOWNSETS,
    precision: float = 1e-7,
    seconds: float = 60.0,
) -> TensorStageSolution:
    """Smallest largest stage time.

    Limits are tried until value and bound are within a relative `precision`, then just below the
    value until nothing is found there. That takes at most `seconds`, besides the table of stages,
    which with less than a minute has fewer places to cut.

    Raises:
        ProblemError: The graph has a cycle, or the table of devices is too large.
    """
    began = time.monotonic()
    fewer = int(max_downsets * min(1.0, seconds / 60) ** 0.5)
    count = len(problem.variants)
    in_time = int((6 * (seconds + 2) / (count * SECONDS_PER_PART)) ** 0.5)
    max_downsets = max(2, min(in_time, max(fewer, min(max_downsets, count + 1))))
    sets = make_downsets(
        len(problem.variants),
        np.array(problem.edge_src, np.int32),
        np.array(problem.edge_dst, np.int32),
        max_downsets,
    )
    table = _Table(problem, sets)
    best = table.plan(np.inf)
    if best is None:
        sure = sets.complete and not table.traded
        status = "infeasible" if sure or table.never_fits() else "unknown"
        return TensorStageSolution(None, None, table.bound(), status, time.monotonic() - began)
    best, low, value = _narrow(table, best, precision, time.monotonic() + seconds)
    exact = sets.complete and not table.traded
    bound = min(value, low) if exact else table.bound()
    status = "optimal" if exact and value <= low else "feasible"
    return TensorStageSolution(tuple(best), value, bound, status, time.monotonic() - began)


def _narrow(
    table: _Table, best: list[TensorStage], precision: float, deadline: float
) -> tuple[list[TensorStage], float, float]:
    """Stages, what no stages are below, and the value reached: the same, if time allows.

    The limit grows from the bound until it can be kept: small limits are quick to refute.
    """
    low = table.bound()
    value = max(stage.seconds_per_sample for stage in best)
    step = max(low * 0.05, value * 1e-6)
    while value > low and time.monotonic() < deadline:
        is_close = value <= low * (1 + precision)
        limit = value * (1 - _HAIR) if is_close else min((low + value) / 2, low + step)
        better = table.plan(limit)
        if better is None:
            low, step = (value if is_close else limit), step * 2
            continue
        best, step = better, np.inf
        value = max(stage.seconds_per_sample for stage in best)
    return best, low, value


def evaluate_stage(
    problem: TensorStageProblem,
    nodes: tuple[int, ...],
    tensor_degree: int,
    data_degree: int,
    variant: tuple[str, ...],
    in_flight: int,
) -> tuple[float, float]:
    """Seconds per sample and bytes on each device of one stage, as the problem defines them."""
    inside = set(nodes)
    total, held = 0.0, 0.0
    for node, name in zip(nodes, variant, strict=True):
        v = next(x for x in problem.variants[node][tensor_degree] if x.name == name)
        moved = 0.0
        for a, b, size in zip(problem.edge_src, problem.edge_dst, problem.edge_bytes, strict=True):
            if b == node and a not in inside:
                moved += size + v.sync_forward_bytes.get(a, 0.0)
            if a == node and b not in inside:
                moved += size + v.sync_backward_bytes.get(b, 0.0)
        sync = 4.0 * (data_degree - 1) / data_degree * v.parameter_bytes / problem.batch
        total += (v.seconds_per_sample + 2.0 * moved / problem.bandwidth) / data_degree
        total += sync / problem.bandwidth
        held += v.bytes_per_sample * in_flight + v.fixed_bytes
    return total, held


@dataclass(frozen=True, eq=False)
class _Outline:
    """What is known of a stage before its variants are chosen.

    Attributes:
        fastest: Time with the fastest variants, whatever their memory. `[degrees]`
        fastest_samples: Most samples in flight with which these fit. `[degrees]`
        most_samples: Most samples in flight with which the smallest variants fit.
    """

    fastest: Reals
    fastest_samples: NDArray[np.int64]
    most_samples: int


class _Table:
    """Costs of all stages (pairs of down-sets), and the programme that joins them."""

    def __init__(self, problem: TensorStageProblem, sets: Downsets) -> None:
        self.problem, self.sets = problem, sets
        self.edges_at: list[list[tuple[int, int, float]]] = [[] for _ in problem.variants]
        for edge in zip(problem.edge_src, problem.edge_dst, problem.edge_bytes, strict=True):
            for end in edge[:2]:
                self.edges_at[end].append(edge)
        self.in_flight = min(problem.num_devices, problem.batch)  # at most, in all stages
        if (self.in_flight + 1) * len(sets.members) > _MAX_ENTRIES:
            raise ProblemError(
                f"{problem.num_devices} devices, a batch of {problem.batch} and "
                f"{len(sets.members)} places to cut are more than {_MAX_ENTRIES} entries of the "
                f"programme. Use fewer devices."
            )
        self.traded = False  # variants of some stage may not be the best that fit
        self.degrees = [d for d in range(1, self.in_flight + 1) if problem.batch % d == 0]
        self.stages = [
            (low, high, t)
            for high in range(1, len(sets.members))
            for low in sets.below(high).tolist()
            for t in self._tensor_degrees(low, high)
        ]
        self.parts = {key: self._parts(*key) for key in self.stages}
        self._choices: dict[
            tuple[int, int, int, int, int], tuple[float, tuple[int, ...]] | None
        ] = {}
        self.by_low: dict[int, list[tuple[tuple[int, int, int], _Outline]]] = {}
        for key in self.stages:
            self.by_low.setdefault(key[0], []).append((key, self._outline(key)))

    def _nodes(self, low: int, high: int) -> list[int]:
        return np.flatnonzero(self.sets.members[high] & ~self.sets.members[low]).tolist()

    def _tensor_degrees(self, low: int, high: int) -> list[int]:
        shared = [set(self.problem.variants[v]) for v in self._nodes(low, high)]
        both = set.intersection(*shared)
        return sorted(t for t in both if t <= self.problem.num_devices)

    def _parts(self, low: int, high: int, t: int) -> list[list[tuple[float, float, float, float]]]:
        """Per node and variant: time that `d` divides, parameter bytes, A, B."""
        nodes = self._nodes(low, high)
        inside, parts = set(nodes), []
        for node in nodes:
            row = []
            for v in self.problem.variants[node][t]:
                divided, _ = evaluate_stage_node(self.problem, node, v, inside, self.edges_at[node])
                row.append((divided, v.parameter_bytes, v.bytes_per_sample, v.fixed_bytes))
            parts.append(row)
        return parts

    def _outline(self, key: tuple[int, int, int]) -> _Outline:
        problem, degree = self.problem, np.array(self.degrees, np.float64)
        rate = 4.0 * (degree - 1) / degree / problem.batch / problem.bandwidth
        in_flight = np.arange(1, self.in_flight + 1, dtype=np.float64)
        total, per_sample, fixed = (np.zeros(len(degree)) for _ in range(3))
        least = np.zeros(self.in_flight)
        for row in self.parts[key]:
            parts = np.array(row)
            times = parts[:, :1] / degree + rate * parts[:, 1:2]
            best = np.argmin(times, axis=0)
            total += times[best, np.arange(len(degree))]
            per_sample += parts[best, 2]
            fixed += parts[best, 3]
            least += np.min(parts[:, 2:3] * in_flight + parts[:, 3:4], axis=0)
        free = problem.memory_bytes - fixed
        with np.errstate(over="ignore"):  # what holds nothing per sample: infinitely many
            fits = np.where(free >= 0, free / np.maximum(per_sample, 1e-300), -1.0)
        samples = np.minimum(np.floor(fits * (1 - 1e-12)), problem.num_devices).astype(np.int64)
        return _Outline(total, samples, int((least <= problem.memory_bytes).sum()))

    def choose(
        self, key: tuple[int, int, int], d: int, y: int
    ) -> tuple[float, tuple[int, ...]] | None:
        """Least time of a stage with `y` samples in flight, and its variants; None: too large."""
        full = (*key, d, y)
        if full not in self._choices:
            self._choices[full] = self._choose(key, d, y)
        return self._choices[full]

    def _choose(
        self, key: tuple[int, int, int], d: int, y: int
    ) -> tuple[float, tuple[int, ...]] | None:
        problem = self.problem
        rate = 4.0 * (d - 1) / d / problem.batch / problem.bandwidth
        times = [[part[0] / d + rate * part[1] for part in row] for row in self.parts[key]]
        held = [[part[2] * y + part[3] for part in row] for row in self.parts[key]]
        chosen = [min(range(len(row)), key=lambda j, row=row: row[j]) for row in times]  # type: ignore[misc]
        over = sum(h[j] for h, j in zip(held, chosen, strict=True)) - problem.memory_bytes
        if over > 0:
            least = sum(min(row) for row in held)
            if least > problem.memory_bytes:
                return None
            chosen, exact = cheapest_fit(times, held, problem.memory_bytes)
            self.traded |= not exact
        return sum(t[j] for t, j in zip(times, chosen, strict=True)), tuple(chosen)

    def bound(self) -> float:
        """Seconds per sample if work could be cut anywhere and nothing moved."""
        work = 0.0
        for row in self.problem.variants:
            work += min(t * v.seconds_per_sample for t, vs in row.items() for v in vs)
        return work / self.problem.num_devices

    def never_fits(self) -> bool:
        """Whether some node alone needs more than a device has, in every variant."""
        limit = self.problem.memory_bytes
        return any(
            all(v.bytes_per_sample + v.fixed_bytes > limit for vs in row.values() for v in vs)
            for row in self.problem.variants
        )

    def _fits(self, key: tuple[int, int, int], outline: _Outline, at: int, limit: float) -> int:
        """Most samples in flight with which a stage keeps within `limit`; 0: none."""
        d = self.degrees[at]
        most = -(-self.in_flight // d)
        low = min(most, int(outline.fastest_samples[at])) if outline.fastest[at] <= limit else 0
        high = max(0, low, min(most, outline.most_samples))
        if limit == np.inf:
            return high
        low = max(0, low)
        while low < high:
            middle = (low + high + 1) // 2
            choice = self.choose(key, d, middle)
            good = choice is not None and choice[0] <= limit
            low, high = (middle, high) if good else (low, middle - 1)
        return low

    def plan(self, limit: float) -> list[TensorStage] | None:
        """Stages within `limit` seconds that use the fewest devices; None: too many devices.

        `devices[I, s]`: fewest devices for all nodes outside down-set `I` with degrees that sum to
        `s`; built from the last stage to the first.
        """
        k, count = self.problem.num_devices, len(self.sets.members)
        most = self.in_flight
        devices = np.full((count, most + 1), NEVER, np.int64)
        came = np.zeros((count, most + 1, 3), np.int64)
        devices[count - 1, 0] = 0
        for low in range(count - 2, -1, -1):
            for key, outline in self.by_low.get(low, ()):
                _, high, t = key
                fewest = int(devices[high].min())
                for at in np.flatnonzero(outline.fastest <= limit * (1 + 1e-9)).tolist():
                    d = self.degrees[at]
                    if fewest + d * t > k:
                        break
                    y = self._fits(key, outline, at, limit)
                    if not y:
                        continue
                    upto = min(most, y * d)
                    after = devices[high, : upto - d + 1] + t * d
                    here = devices[low, d : upto + 1]
                    better = (after < here) & (after <= k)
                    here[better] = after[better]
                    came[low, d : upto + 1][better] = high, t, d
        s = int(np.argmin(devices[0]))
        if devices[0, s] > k:
            return None
        return self._stages(came, s)

    def _stages(self, came: NDArray[np.int64], s: int) -> list[TensorStage]:
        stages: list[TensorStage] = []
        low = 0
        while low < len(self.sets.members) - 1:
            high, t, d = (int(x) for x in came[low, s])
            y = -(-s // d)
            choice = self.choose((low, high, t), d, y)
            assert choice is not None
            nodes = tuple(self._nodes(low, high))
            names = tuple(
                self.problem.variants[v][t][j].name for v, j in zip(nodes, choice[1], strict=True)
            )
            took, held = evaluate_stage(self.problem, nodes, t, d, names, y)
            stages.append(TensorStage(nodes, t, d, names, took, held))
            low, s = high, s - d
        return stages


def evaluate_stage_node(
    problem: TensorStageProblem,
    node: int,
    v: StageVariant,
    inside: set[int],
    edges: Sequence[tuple[int, int, float]],
) -> tuple[float, float]:
    """Time of a node that replicas share, s, and the bytes it moves out of and into its stage.

    `edges` are those at the node: producer, consumer, bytes.
    """
    moved = 0.0
    for a, b, size in edges:
        if b == node and a not in inside:
            moved += size + v.sync_forward_bytes.get(a, 0.0)
        if a == node and b not in inside:
            moved += size + v.sync_backward_bytes.get(b, 0.0)
    return v.seconds_per_sample + 2.0 * moved / problem.bandwidth, moved
