"""What to keep and what to compute again: one minimum cut for a region of a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from devplace.step_capture.analysis import reads_rows_only
from devplace.step_capture.rewrites.readers import Readers, num_bytes

Node: TypeAlias = torch.fx.Node
Arc: TypeAlias = tuple[int, int, int]  # from, to, capacity

# A byte kept until the backward pass weighs as much as this many bytes moved. Of no great weight:
# 2 to 16 keep the same of GPT-2 and BERT-large under autocast
# (kept and moved bytes of captured steps, torch 2.13).
KEPT = 4
_SOURCE, _SINK, _UNLIMITED = 0, 1, -1
# A kernel that repeats these reads their input twice: once to sum over rows, once to use the sum.
_SUMS_OVER_ROWS = frozenset(
    ["_native_batch_norm_legit_functional", "_native_batch_norm_legit", "native_batch_norm"]
)
# A kernel that repeats these has the row at hand, but works on it twice.
_SUMS_WITHIN_ROWS = frozenset(["native_layer_norm", "native_group_norm", "_fused_rms_norm"])
# So do those whose output is so many times smaller than their input; a cast to bool is 2 to 8.
_FEWER = 8


@dataclass
class Network:
    """Flow network of one region, built backwards from the values that the backward pass wants.

    A value is an arc whose capacity is what it costs to keep it and to read it, in bytes moved. An
    op is a node: it is computed again if it lies on the side of the sink, and then all it reads is
    kept or computed again too. An arc from the source to an op is what computing it costs.

    Attributes:
        readers: Of the graph.
        region: Ops that may be computed again together.
        wanted: Values made in the region that the backward pass reads and nothing else keeps.
        is_free: Whether a value is kept anyway, or there before the step.
        is_read: Whether a kernel of the backward pass reads a value anyway.
        arcs: The network, numbered in the order it was built: equal regions have equal arcs.
        values: Value -> its arc's ends; of values made elsewhere the first is the source.
        ops: Op -> its node.
    """

    readers: Readers
    region: set[Node]
    wanted: Collection[Node]
    is_free: Callable[[Node], bool]
    is_read: Callable[[Node], bool]
    arcs: list[Arc] = field(default_factory=list)
    values: dict[Node, tuple[int, int]] = field(default_factory=dict)
    ops: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._count = 2
        self._todo: list[Node] = []
        for value in self.wanted:
            self.arcs.append((self._value(value), _SINK, _UNLIMITED))
        while self._todo:
            op = self._todo.pop()
            for value in self.readers.inputs[op]:
                self.arcs.append((self._value(value), self.ops[op], _UNLIMITED))
            cost = _repeat_bytes(op)
            if cost:
                self.arcs.append((_SOURCE, self.ops[op], cost))

    def _node(self) -> int:
        self._count += 1
        return self._count - 1

    def _value(self, value: Node) -> int:
        """The node behind a value's arc."""
        if value not in self.values:
            maker, start = self.readers.maker(value), _SOURCE
            if maker in self.region:
                if maker not in self.ops:
                    self.ops[maker] = self._node()
                    self._todo.append(maker)
                start = self.ops[maker]
                if len(self.readers.made[maker]) > 1:
                    start = self._node()
                    self.arcs.append((self.ops[maker], start, _UNLIMITED))
            self.values[value] = start, self._node()
            self.arcs.append((*self.values[value], self._cost(value)))
        return self.values[value][1]

    def _cost(self, value: Node) -> int:
        """Bytes moved, and `KEPT` times bytes kept, if the backward pass reads a kept value."""
        size = num_bytes(value)
        readers = self.readers.readers[value]
        if self.is_free(value):
            by_rows = all(reads_rows_only(each) for each in readers if each in self.region)
            is_spared = self.is_read(value) or (value.op == "placeholder" and by_rows)
            return 0 if is_spared else size
        is_written = any(each not in self.region and not is_late(each) for each in readers)
        return size * (KEPT + (not is_written) + 1)

    def kept_and_repeated(self, behind: frozenset[int]) -> tuple[set[Node], set[Node]]:
        """Values that a cut keeps, and values that are computed again.

        Args:
            behind: Nodes on the side of the sink.
        """
        ends = self.values.items()
        kept = {value for value, (a, b) in ends if b in behind and a not in behind}
        return kept, {value for value, (a, _) in ends if a in behind}


def is_late(node: Node) -> bool:
    """Whether an op runs after the forward pass."""
    return node.op == "call_function" and node.meta["tag"].stage in ("backward", "update")


def is_update(node: Node) -> bool:
    """Whether an op belongs to the update of parameters and state."""
    return is_late(node) and node.meta["tag"].stage != "backward"


def _repeat_bytes(op: Node) -> int:
    """What it costs to compute an op again beyond reading what it reads once, in bytes moved."""
    target: Any = op.target
    name = target.overloadpacket.__name__
    reads_little = reads_rows_only(op) or not op.all_input_nodes
    first = 0 if reads_little else num_bytes(op.all_input_nodes[0])
    if name in _SUMS_OVER_ROWS:
        return first
    is_reduction = num_bytes(op) < first // _FEWER
    return first // 4 if is_reduction or name in _SUMS_WITHIN_ROWS else 0


def cheapest_cut(arcs: tuple[Arc, ...]) -> frozenset[int]:
    """The nodes on the sink's side of a minimum cut, as few as there can be.

    Args:
        arcs: Node 0 is the source, node 1 the sink; a capacity of -1 is unlimited. There must be no
            unlimited path from source to sink.
    """
    import networkx as nx
    from networkx.algorithms.flow import shortest_augmenting_path

    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for start, end, capacity in arcs:
        if capacity == _UNLIMITED:
            network.add_edge(start, end)
        elif network.has_edge(start, end):
            network[start][end]["capacity"] += capacity
        else:
            network.add_edge(start, end, capacity=capacity)
    cut = nx.minimum_cut(network, _SOURCE, _SINK, flow_func=shortest_augmenting_path)
    _, (_, behind) = cut
    return frozenset(behind)
