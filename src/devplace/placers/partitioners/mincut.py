"""Min-cut: METIS over the accelerators."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from devplace.errors import InputError
from devplace.placers.colocation_groups import I32, I64, legal
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.extras import missing
from devplace.placers.partitioners.group_graph import (
    GroupGraph,
    device_weights,
    group_graph,
    mean_work,
    scaled,
)
from devplace.placers.partitioners.quiet import quiet_stdout
from devplace.placers.partitioners.repair import repaired
from devplace.problem import Placement, Problem

Library = Literal["metis", "mt-kahypar"]


@dataclass(frozen=True)
class MinCut:
    """Parts of work proportional to the accelerators' speeds with few bytes between them.

    A vertex is a colocation group with its mean time, an edge the bytes between two groups. Memory
    is not looked at.

    Source: Karypis, Kumar (1998), A fast and high quality multilevel scheme for partitioning
    irregular graphs, SIAM J. Scientific Computing 20(1), k-way; as a baseline in Mirhoseini et al.
    (2017), arXiv 1706.04972 (Scotch without the CPU). Differs from it in that METIS
    partitions instead of Scotch. The same problem always gives the same plan, whatever the seed.

    Attributes:
        library: `metis`, or `mt-kahypar` (Gottesbueren et al. 2021, deterministic preset).
        imbalance: Part by which a device may have more work than its share.

    Raises:
        InputError: Another library, or an imbalance that is not positive.
    """

    name: str = "mincut"
    library: Library = "metis"
    imbalance: float = 0.03

    def __post_init__(self) -> None:
        if self.library not in ("metis", "mt-kahypar"):
            raise InputError(f"library must be metis or mt-kahypar, got {self.library!r}.")
        if not self.imbalance >= 0.001:
            raise InputError(f"imbalance must be at least 0.001, got {self.imbalance}.")

    def supports(self, problem: Problem) -> str:
        """With the library installed."""
        if self.library == "metis":
            return missing("pymetis", "pymetis", "partition")
        return missing("mtkahypar", "mtkahypar", "kahypar")

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Partition the graph once."""
        graph = group_graph(problem)
        devices = _fastest(problem, problem.accelerators, graph.num_groups)
        parts = np.zeros(graph.num_groups, np.int32)
        if len(devices) > 1:
            work = scaled(mean_work(problem, devices), 1)
            part = _metis if self.library == "metis" else _kahypar
            parts = part(graph, work, device_weights(problem, devices), self.imbalance)
        wish = np.array(devices, np.int32)[parts]
        return Placement(problem.spaces.op_devices_of_groups(legal(problem, wish)))


@dataclass(frozen=True)
class MinCutRepaired(MinCut):
    """`mincut`, then ops are moved off devices that hold too much; see `repaired`."""

    name: str = "mincut-repaired"

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Partition the graph once, then repair."""
        return repaired(problem, super().__call__(problem, evaluate, rng), evaluate)


def _fastest(problem: Problem, devices: list[int], most: int) -> list[int]:
    """At most so many devices: there cannot be more parts than vertices."""
    order = np.argsort(-device_weights(problem, devices), kind="stable")[: max(1, most)]
    return [devices[k] for k in sorted(order.tolist())]


def _metis(graph: GroupGraph, work: I64, speeds: I64, imbalance: float) -> I32:
    import pymetis

    total = float(speeds.sum())
    with quiet_stdout():  # METIS complains about parts that stay empty
        _, parts = pymetis.part_graph(
            len(speeds),
            pymetis.CSRAdjacency(graph.ptr, graph.neighbour),
            vweights=work.tolist(),
            eweights=scaled(graph.num_bytes, 1).tolist(),
            tpwgts=[float(speed) / total for speed in speeds],
            recursive=False,
            options=pymetis.Options(seed=0, ufactor=round(1000 * imbalance)),
        )
    return np.array(parts, np.int32)


def _kahypar(graph: GroupGraph, work: I64, speeds: I64, imbalance: float) -> I32:
    import mtkahypar

    ends = np.repeat(np.arange(graph.num_groups), np.diff(graph.ptr))
    once = ends < graph.neighbour
    pairs = list(zip(ends[once].tolist(), graph.neighbour[once].tolist(), strict=True))
    mtkahypar.set_seed(0)
    library = _kahypar_library()
    context = library.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(len(speeds), imbalance, mtkahypar.Objective.CUT)
    share = (work.sum() + len(work)) * (1 + imbalance) * speeds / speeds.sum()
    context.set_individual_target_block_weights(np.ceil(share).astype(int).tolist())
    context.logging = False
    made = library.create_graph(
        context,
        graph.num_groups,
        len(pairs),
        pairs,
        np.maximum(work, 1).tolist(),
        scaled(graph.num_bytes[once], 1).tolist(),
    )
    found = made.partition(context)
    return np.array([found.block_id(group) for group in range(graph.num_groups)], np.int32)


@functools.cache
def _kahypar_library() -> Any:
    """Mt-KaHyPar on one thread; it may be started only once."""
    import mtkahypar

    return mtkahypar.initialize(1)
