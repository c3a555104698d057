"""Computes cheap forward ops again in the backward pass, where that keeps fewer bytes for it.

As the min-cut partitioner of torch.compile (torch/_functorch/partitioners.py; Chen et al. 2016,
"Training deep nets with sublinear memory cost", is the idea). Differs from it: one cut for each
region of fusible ops between two own calls instead of one for the whole step, so that cuts are
small and equal layers share one; cuts are made in turn, each given what the others keep.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from devplace.step_capture.rewrites.forward_copies import Copies
from devplace.step_capture.rewrites.min_cut import (
    Arc,
    Network,
    cheapest_cut,
    is_late,
    is_update,
)
from devplace.step_capture.rewrites.readers import Readers, num_bytes

Node: TypeAlias = torch.fx.Node

_SWEEPS = 3  # the second changes little, the third hardly anything
_MAX_OPS = 300  # of a region; the time of a cut grows with its square (0.1 s for 300)
_MAX_DEPTHS = 2  # of fusible readers of a value; with more it would be computed over and over


def recompute(graph: torch.fx.Graph, spans_passes: bool = False) -> None:
    """Let the backward pass compute forward values again rather than read kept ones.

    A value that the backward pass reads is computed again if that keeps fewer bytes of forward
    values and costs fewer bytes moved than `KEPT` times as many. Only fusible ops are computed
    again, from sources and kept values; their copies are in stage `backward`, keep the rest of
    their tag, and stand right before their first reader.

    Args:
        graph: A captured step, functional and clean, with `val` and `tag` of every node.
        spans_passes: Whether one kernel may hold fusible ops of both passes. Then a fusible reader
            as deep as the value that it reads needs no copy: nothing is kept for it.

    Complexity: Linear, and one small cut for each kind of region.
    """
    _Recompute(graph, spans_passes).run()


class _Recompute:
    """One run of the pass.

    Attributes:
        regions: Sets of fusible forward ops that are computed again only together.
        region: Op -> index of its region.
        wanted: Region -> its values that fusible ops of the backward pass, which are given, may
            read as copies. Computed again in their kernel, they are neither written nor read.
        kept: Region -> values that it needs kept: of its own, or that its copies read.
        repeated: Region -> values that are computed again.
        holders: Value -> how many regions need it kept.
        pinned: Values that ops read in any case after the forward pass, or that are results.
    """

    def __init__(self, graph: torch.fx.Graph, spans_passes: bool) -> None:
        self.graph = graph
        self.spans_passes = spans_passes
        self.readers = Readers(graph)
        self.regions = _regions(self.readers)
        self.region = {op: k for k, ops in enumerate(self.regions) for op in ops}
        self.wanted: list[dict[Node, Sequence[Node]]] = [{} for _ in self.regions]
        self.pinned: set[Node] = set()
        for value, readers in self.readers.readers.items():
            self._sort_value(value, readers)
        self.kept = [set(wanted) for wanted in self.wanted]
        self.repeated: list[set[Node]] = [set() for _ in self.regions]
        self.holders = Counter(value for kept in self.kept for value in kept)
        self._solved: dict[tuple[Arc, ...], frozenset[int]] = {}

    def _sort_value(self, value: Node, readers: Iterable[Node]) -> None:
        """See whether a value is wanted by the backward pass as it is or as a copy."""
        late = [each for each in readers if is_late(each)]
        fused = [each for each in late if each in self.readers.fusible]
        is_fixed = len(fused) < len(late)  # an own call reads it from memory
        region = self.region.get(self.readers.maker(value))
        depth = self.readers.depth
        if self.spans_passes and region is not None:
            fused = [each for each in fused if depth[each] != depth[value]]
        is_fixed |= any(each.op == "output" or is_update(each) for each in readers)
        if region is None or is_fixed or len({depth[each] for each in fused}) > _MAX_DEPTHS:
            if late or is_fixed:
                self.pinned.add(value)
        elif fused:
            self.wanted[region][value] = fused

    def run(self) -> None:
        """Find what is best for each region given the others, until nothing changes; then copy."""
        for _ in range(_SWEEPS):
            if not any([self._solve(k) for k in range(len(self.regions))]):
                break
        Copies(self.graph, self.readers, self.region, self.wanted, self.repeated).make()

    def _is_kept_elsewhere(self, region: int, value: Node) -> bool:
        if value in self.pinned or not self.readers.inputs[self.readers.maker(value)]:
            return True  # sources are there, constants are made where they are read
        return self.holders[value] > (value in self.kept[region])

    def _is_read(self, value: Node) -> bool:
        """Whether a fusible op of the backward pass reads a value."""
        readers = self.readers.readers[value]
        return any(is_late(each) and each in self.readers.fusible for each in readers)

    def _solve(self, region: int) -> bool:
        """Choose anew what a region keeps; tells whether that changed."""

        def is_free(value: Node) -> bool:
            return self._is_kept_elsewhere(region, value)

        wanted = {v: w for v, w in self.wanted[region].items() if not is_free(v)}
        if not wanted:
            return False
        ops = self.regions[region]
        network = Network(self.readers, ops, wanted, is_free, self._is_read)
        key = tuple(network.arcs)
        if key not in self._solved:
            self._solved[key] = cheapest_cut(key)
        kept, repeated = network.kept_and_repeated(self._solved[key])
        kept |= self.wanted[region].keys() - repeated
        before = self.kept[region]
        if self._size(region, kept) >= self._size(region, before):
            return False
        self.holders.subtract(before)
        self.holders.update(kept)
        self.kept[region], self.repeated[region] = kept, repeated
        return True

    def _size(self, region: int, values: Iterable[Node]) -> int:
        """Bytes of values that only this region keeps."""
        return sum(num_bytes(v) for v in values if not self._is_kept_elsewhere(region, v))


def _regions(readers: Readers) -> list[set[Node]]:
    """Connected fusible forward ops of equal depth; very large ones in pieces."""
    parent: dict[Node, Node] = {}

    def find(op: Node) -> Node:
        while parent[op] is not op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    for op in readers.inputs:
        if op not in readers.fusible or is_late(op):
            continue
        makers = [readers.maker(value) for value in readers.inputs[op]]
        if any(is_late(maker) for maker in makers):
            continue
        parent[op] = op
        for maker in makers:
            is_constant = not readers.inputs[maker]
            if maker in parent and not is_constant and readers.depth[maker] == readers.depth[op]:
                parent[find(maker)] = find(op)
    regions: dict[Node, list[Node]] = defaultdict(list)
    for op in parent:
        regions[find(op)].append(op)
    return [
        set(ops[k : k + _MAX_OPS]) for ops in regions.values() for k in range(0, len(ops), _MAX_OPS)
    ]
