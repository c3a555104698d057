"""Group ops by module path, and split main path from weight-gradient side path.

An op is on the *side path* when nothing but the update of one parameter needs it: weight
gradients, their sums, the update itself. It can wait until devices are idle, so it is decided apart
from the main path (forward, and the gradients that flow on to earlier layers).
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
    """For each op on the side path the module whose parameter it serves, else None.

    Ops that serve all parameters in the update stage (the norm of all gradients, when it is
    clipped) do not put a weight gradient on the main path.
    """
    several = -2
    serves = [-1] * len(graph.ops)  # source op index of the one parameter served
    producer = graph.producer
    readers: list[list[int]] = [[] for _ in graph.ops]
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            readers[producer[tensor]].append(index)
    home = _parameter_sources(graph)
    for result in graph.results:
        maker = producer[result.tensor]
        if result.replaces < 0:
            serves[maker] = several
            continue
        source = home[result.replaces]
        serves[maker] = source if serves[maker] in (-1, source) else several
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        found = {serves[reader] for reader in readers[index]} - {-1}
        if op.stage != "update":
            found -= {
                several
                for reader in readers[index]
                if graph.ops[reader].stage == "update" and serves[reader] == several
            } - {serves[reader] for reader in readers[index] if graph.ops[reader].stage != "update"}
        if serves[index] != -1:
            found.add(serves[index])
        if found:
            serves[index] = found.pop() if len(found) == 1 else several
    for source in graph.replaced:
        serves[source] = home[source]
    return [graph.ops[s].module if s >= 0 else None for s in serves]


def _parameter_sources(graph: OpGraph) -> dict[int, int]:
    """Replaced source -> the parameter it belongs to (itself, unless it is optimizer state)."""
    by_name = {graph.ops[i].name: i for i in graph.replaced if graph.ops[i].role == "parameter"}
    return {
        i: by_name.get(parameter_name(graph.ops[i].name, graph.ops[i].role), i)
        for i in graph.replaced
    }


def parameter_name(source_name: str, role: str) -> str:
    """Name of the parameter a source belongs to: state sources are named `slot[parameter]`."""
    if role != "state":
        return source_name
    return source_name.partition("[")[2].removesuffix("]") or source_name


def coarsen(
    graph: OpGraph,
    depth: int,
    by_micro_batch: bool = False,
    calls: int = 1,
    owner: list[str | None] | None = None,
) -> Coarsening:
    """Classes of ops: module path cut to `depth` parts x main or side path.

    Args:
        graph: The graph.
        depth: Parts of the module path that count.
        by_micro_batch: Tell micro-batches apart.
        calls: Cut the calls of a module (time steps of an unrolled cell) into this many runs.
        owner: `side_owner(graph)`, if it is known.
    """
    owner = side_owner(graph) if owner is None else owner
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
        run = op.call * calls // most_calls[op.module] if op.stage != "update" else 0
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
