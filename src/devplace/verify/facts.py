"""Facts of a graph for the verifier: work, transfers and memory, in plain lists.

From the rules in the docs: a view costs nothing and lies in its base's memory; a view of the whole
travels as its base, one of a part by itself; a source that the step only reads is wherever it is
read, a replaced one is work that is done at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from devplace.graph import OpGraph
from devplace.graph.overwrite import overwritten_sources


@dataclass(frozen=True)
class Facts:
    """What has to be done.

    Attributes:
        work: Ops that run, and sources that are replaced, in graph order.
        reads: Work op -> tensors it waits for, as they travel.
        sends: Work op -> tensors it makes that others read, as they travel, by tensor id.
        readers: Tensor -> work ops that read it, in graph order.
        owned: Work op -> tensors whose memory it takes.
        memory_of: Tensor that travels -> tensor whose memory it lies in.
        owner: Tensor -> op whose memory it lies in.
        kept: Tensors whose memory stays to the end (results).
        over: Tensor -> tensor of the source that it may be computed over.
        constants: Read-only source -> work ops that read it.
    """

    work: list[int]
    reads: dict[int, list[int]]
    sends: dict[int, list[int]]
    readers: dict[int, list[int]]
    owned: dict[int, list[int]]
    memory_of: dict[int, int]
    owner: list[int]
    kept: set[int]
    over: dict[int, int]
    constants: dict[int, set[int]]


def facts(graph: OpGraph) -> Facts:
    """Read them off a graph."""
    size = [tensor.num_bytes for tensor in graph.tensors]
    travels_as, memory, owner = bases(graph, size)
    replaced = {result.replaces for result in graph.results if result.replaces >= 0}
    work = [
        v
        for v, op in enumerate(graph.ops)
        if not op.is_view and (not op.is_source or v in replaced)
    ]
    is_work = set(work)
    reads: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    constants: dict[int, set[int]] = {
        v: set() for v, op in enumerate(graph.ops) if op.is_source and v not in replaced
    }
    for v in work:
        reads[v] = []
        for tensor in dict.fromkeys(travels_as[t] for t in graph.ops[v].inputs):
            if owner[tensor] in is_work:
                reads[v].append(tensor)
                readers.setdefault(tensor, []).append(v)
            else:
                constants[owner[tensor]].add(v)
    sends: dict[int, list[int]] = {v: [] for v in work}
    for tensor in sorted(readers):
        sends[owner[tensor]].append(tensor)
    owned = {v: [t for t in graph.ops[v].outputs if memory[t] == t] for v in work}
    over = {}
    for tensor, source in overwritten_sources(graph).items():
        old = graph.ops[source].outputs[0]
        if old in graph.ops[graph.producer[tensor]].inputs:
            over[tensor] = old
    return Facts(
        work,
        reads,
        sends,
        readers,
        owned,
        {tensor: memory[tensor] for tensor in readers},
        owner,
        {memory[result.tensor] for result in graph.results},
        over,
        constants,
    )


def bases(graph: OpGraph, size: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """For each tensor: as what it travels, in whose memory it lies, and which op owns that."""
    travels_as, memory = list(range(len(size))), list(range(len(size)))
    owner = list(graph.producer)
    for op in graph.ops:
        for tensor in op.outputs if op.is_view else ():
            base = op.alias_of
            memory[tensor], owner[tensor] = memory[base], owner[base]
            counts_elements = "as_strided" in op.target  # of the storage, and copies have another
            if size[tensor] >= size[travels_as[base]] and not counts_elements:
                travels_as[tensor] = travels_as[base]
    return travels_as, memory, owner
