"""Colocation groups and the bytes between them: what graph partitioners work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.colocation_groups import group_time_ns
from devplace.problem import Problem

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
_LARGEST = 2**30
"""Partitioners may count in 32 bits: no sum of weights exceeds this."""


@dataclass(frozen=True, eq=False)
class GroupGraph:
    """An undirected graph without loops; each edge is there from both ends.

    Attributes:
        ptr: Neighbours of group g are `neighbour[ptr[g]:ptr[g+1]]`. `[G+1]`
        neighbour: `[2 E]`
        num_bytes: Bytes that would cross a cut between the two, in both directions. `[2 E]`
    """

    ptr: I64
    neighbour: I64
    num_bytes: I64

    @property
    def num_groups(self) -> int:
        """Number of vertices."""
        return len(self.ptr) - 1


def group_graph(problem: Problem) -> GroupGraph:
    """The graph of a problem. A tensor counts once for each group that reads it.

    Read-only sources are on every device that reads them and make no edge. O(E log E).
    """
    tasks = problem.core.tasks
    count = tasks.num_groups
    carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
    reader = tasks.group[tasks.cons].astype(np.int64)
    once = np.unique(carrier * max(1, count) + reader)
    carrier, reader = once // max(1, count), once % max(1, count)
    maker = tasks.group[tasks.carrier_maker[carrier]].astype(np.int64)
    apart = maker != reader
    ends = np.concatenate([maker[apart], reader[apart]])
    others = np.concatenate([reader[apart], maker[apart]])
    num_bytes = np.tile(tasks.carrier_bytes[carrier[apart]], 2)
    pairs, index = np.unique(ends * max(1, count) + others, return_inverse=True)
    total = np.zeros(len(pairs), np.int64)
    np.add.at(total, index, num_bytes)
    ptr = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(pairs // max(1, count), minlength=count), out=ptr[1:])
    return GroupGraph(ptr, pairs % max(1, count), total)


def scaled(weight: NDArray[np.float64] | I64, smallest: int) -> I64:
    """Weights as integers of at least `smallest` whose sum fits 32 bits."""
    values = np.asarray(weight, np.float64)
    total = float(values.sum())
    factor = min(1.0, _LARGEST / total) if total > 0 else 1.0
    return np.maximum(np.rint(values * factor), smallest).astype(np.int64)


def mean_work(problem: Problem, devices: Sequence[int]) -> F64:
    """Mean time of each group over `devices`. `[G]`"""
    mean: F64 = group_time_ns(problem)[:, list(devices)].mean(axis=1)
    return mean


def device_weights(problem: Problem, devices: Sequence[int]) -> I64:
    """Speed of each device for the whole step, the fastest 1000; at least 1. `[len(devices)]`"""
    total = problem.core.wires.duration_ns[:, list(devices)].sum(axis=0).astype(float)
    if not total.all():
        return np.full(len(devices), 1000, np.int64)
    weights: I64 = np.maximum(1, np.rint(1000 * total.min() / total)).astype(np.int64)
    return weights
