"""Which ops belong together: module paths, and the main path against the weight-gradient side path.

An op is on the *side path* when nothing but parameter updates needs it: weight gradients, their
sums, the updates themselves. It can wait until devices are idle, so it is decided apart from the
main path (forward, and the gradients that flow on to earlier layers).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.graph.graph import OpGraph

I32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Coarsening:
    """One level of decision classes.

    Attributes:
        label: What each class is, as text.
        of_op: Class of each op; classes are numbered in the order of their first op. int32 `[V]`
    """

    label: tuple[str, ...]
    of_op: I32

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.label)


def side_owner(graph: OpGraph) -> list[str | None]:
    """For each op on the side path the module whose parameters it serves, else None."""
    readers: list[list[int]] = [[] for _ in graph.ops]
    producer = graph.producer
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            readers[producer[tensor]].append(index)
    owner: list[str | None] = [None] * len(graph.ops)
    kept = {producer[r.tensor] for r in graph.results if r.role in ("loss", "output")}
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.stage == "update":
            owner[index] = op.module
        elif op.stage != "source" and readers[index] and index not in kept:
            owners = [owner[reader] for reader in readers[index]]
            if all(found is not None for found in owners):
                owner[index] = owners[0]
    for index, op in enumerate(graph.ops):
        if op.stage == "source" and index in graph.replaced:
            owner[index] = op.module
    return owner


def coarsen(graph: OpGraph, depth: int, by_micro_batch: bool = False, calls: int = 1) -> Coarsening:
    """Classes of ops: module path cut to `depth` parts x main or side path.

    Args:
        graph: The graph.
        depth: Parts of the module path that count.
        by_micro_batch: Tell micro-batches apart.
        calls: Cut the calls of a module (time steps of an unrolled cell) into this many runs.
    """
    owner = side_owner(graph)
    most_calls: dict[str, int] = {}
    for op in graph.ops:
        most_calls[op.module] = max(most_calls.get(op.module, 0), op.call + 1)
    number: dict[tuple[str, str, int, int], int] = {}
    of_op = np.zeros(len(graph.ops), np.int32)
    for index, op in enumerate(graph.ops):
        side = owner[index]
        path = op.module if side is None else side
        part = ".".join(path.split(".")[:depth])
        batch = op.micro_batch if by_micro_batch else -1
        run = op.call * calls // most_calls[op.module] if side is None else 0
        key = (part, "main" if side is None else "side", batch, run)
        of_op[index] = number.setdefault(key, len(number))
    labels = tuple(
        f"{part or '(model)'} {path}"
        + (f" batch {batch}" if batch >= 0 else "")
        + (f" run {run}" if calls > 1 else "")
        for part, path, batch, run in number
    )
    return Coarsening(labels, of_op)


def max_depth(graph: OpGraph) -> int:
    """Parts of the longest module path."""
    return max((op.module.count(".") + 1 for op in graph.ops if op.module), default=1)
