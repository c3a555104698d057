"""Scotch: static mapping of the graph onto devices of unequal speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from devplace.placers.colocation_groups import I32, legal
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.extras import missing
from devplace.placers.partitioners.group_graph import device_weights, group_graph, mean_work, scaled
from devplace.placers.partitioners.repair import repaired
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Scotch:
    """Scotch's static mapping of the graph onto all usable devices, CPUs included.

    A vertex is a colocation group with its mean time, an edge the bytes between two groups, the
    target a complete graph of devices weighted with their speeds. Memory is not looked at.

    Source: Pellegrini, Roman (1996), Scotch: a software package for static mapping by dual
    recursive bipartitioning; used so as a baseline by Mirhoseini et al. (2017), arXiv 1706.04972,
    and, with equal targets and communication times as edges, by Tarnawski et al.
    (2020), arXiv 2006.16423. Differs from these in that the library is run on one thread from a
    fixed random state, so that the same problem always gives the same plan, whatever the seed.

    Attributes:
        quality: Scotch's strategy for quality, slower than its default.
        imbalance: Part by which a device may have more work than its share, with `quality`.
    """

    name: str = "scotch"
    quality: bool = False
    imbalance: float = 0.05

    def supports(self, problem: Problem) -> str:
        """With Scotch's Python package installed."""
        return missing("scotchpy", "scotchpy64", "partition")

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Map the graph once."""
        devices = np.array(problem.usable_devices, np.int32)
        wish = devices[self._parts(problem, devices.tolist())]
        return Placement(problem.spaces.op_devices_of_groups(legal(problem, wish.astype(np.int32))))

    def _parts(self, problem: Problem, devices: list[int]) -> I32:
        graph = group_graph(problem)
        if len(devices) == 1 or graph.num_groups < 2:
            return np.zeros(graph.num_groups, np.int32)
        import scotchpy

        source = scotchpy.Graph()
        source.build(
            verttab=graph.ptr,
            velotab=scaled(mean_work(problem, devices), 1),
            edgetab=graph.neighbour,
            edlotab=scaled(graph.num_bytes, 1),
        )
        target = scotchpy.Arch(init=True)
        target.cmpltw(device_weights(problem, devices))
        strategy = scotchpy.Strat(init=True)
        if self.quality:
            strategy.graph_map_build(scotchpy.STRATQUALITY, len(devices), self.imbalance)
        parts = np.zeros(graph.num_groups, np.int64)
        with _one_thread():
            scotchpy.common.libscotch.SCOTCH_randomReset()
            source.map(target, strat=strategy, parttab=parts)
        return parts.astype(np.int32)


@dataclass(frozen=True)
class ScotchRepaired(Scotch):
    """`scotch`, then ops are moved off devices that hold too much; see `repaired`."""

    name: str = "scotch-repaired"

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Map the graph once, then repair."""
        return repaired(problem, super().__call__(problem, evaluate, rng), evaluate)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Scotch on one thread: several give another mapping at each call. It asks the environment."""
    name = "SCOTCH_PTHREAD_NUMBER"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
