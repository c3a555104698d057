"""Readers of each node, looking through views, and the depth of each op."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, TypeAlias

import torch

from devplace.step_capture.analysis import is_fusible, tensors_in, view_bases

Node: TypeAlias = torch.fx.Node


class Readers:
    """Values of a graph, their makers and readers, as they are when this is made.

    A *value* is a node that owns memory: a placeholder, an op with one output, or the item of an
    op with several. Views and other names of a value stand for it.

    Attributes:
        value: Node -> the value whose memory it shares.
        made: Op -> its values.
        inputs: Op -> values it reads, in order, each once.
        readers: Value -> ops that read it, the output of the graph included, in order.
        fusible: Ops that a compiler can fuse.
        depth: Node -> own calls (ops that are neither fusible nor views) on the longest path up to
            it, itself included.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.value: dict[Node, Node] = {}
        self.made: dict[Node, list[Node]] = {}
        self.inputs: dict[Node, list[Node]] = {}
        self.readers: dict[Node, list[Node]] = defaultdict(list)
        self.fusible: set[Node] = set()
        self.depth: dict[Node, int] = {}
        self._items: dict[tuple[Node, Any], Node] = {}
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        depth = max((self.depth[each] for each in node.all_input_nodes), default=0)
        base = self._base(node)
        self.value[node] = base
        if base is not node or self.is_item(node):
            if base is node:
                self.made[node.args[0]].append(node)
            self.depth[node] = depth
            return
        self.made[node] = [node] if isinstance(node.meta.get("val"), torch.Tensor) else []
        reads = list(dict.fromkeys(self.value[each] for each in node.all_input_nodes))
        self.inputs[node] = reads
        for each in reads:
            self.readers[each].append(node)
        if is_fusible(node):
            self.fusible.add(node)
        elif node.op == "call_function":
            depth += 1
        self.depth[node] = depth

    def _base(self, node: Node) -> Node:
        """The value that a node stands for; itself if it owns its memory."""
        bases = view_bases(node)
        if not bases:
            return node
        if self.is_item(node) and not view_bases(bases[0]):
            return self._items.setdefault((bases[0], node.args[1]), node)
        return self.value[bases[0]]

    @staticmethod
    def is_item(node: Node) -> bool:
        """Whether a node takes one of several outputs."""
        return node.target is operator.getitem

    def maker(self, value: Node) -> Node:
        """The op that makes a value."""
        made: Node = value.args[0] if self.is_item(value) else value
        return made

    def is_whole(self, node: Node) -> bool:
        """Whether a node is an op or source, not a view nor an item."""
        return node in self.made


def num_bytes(value: Node) -> int:
    """Bytes of a value."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value.meta.get("val")))
