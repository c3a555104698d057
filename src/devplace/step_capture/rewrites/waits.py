"""Dependencies between calls of a graph, and the slack of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import torch

from devplace.step_capture.analysis import is_fusible, view_bases

Node: TypeAlias = torch.fx.Node

_NEVER = 2**62  # for what only results need


class Waits:
    """Calls that each node waits for, as the graph is when this is made.

    A *call* is an op that is neither fusible nor a view: a product, a convolution.

    Attributes:
        ready: Node -> calls on the longest path up to it, itself included.
        needed: Node -> the largest `ready` it could have without a call that reads it, directly or
            through fusible ops and views, having to wait for more calls than it does.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.ready: dict[Node, int] = {}
        self.needed: dict[Node, int] = {}
        calls = {node for node in graph.nodes if _is_call(node)}
        for node in graph.nodes:
            before = max((self.ready[each] for each in node.all_input_nodes), default=0)
            self.ready[node] = before + (node in calls)
        for node in reversed(graph.nodes):
            self.needed[node] = min(
                (
                    self.ready[user] - 1 if user in calls else self.needed[user]
                    for user in node.users
                ),
                default=_NEVER,
            )

    def in_step(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Fewest sets such that nodes of a set can be ready together without anything waiting.

        Each node can be ready any time from `ready` to `needed`; sets share a time (the greedy
        cover of intervals by points).
        """
        sets: list[list[Node]] = []
        rest = sorted(nodes, key=lambda node: (self.needed[node], node))
        while rest:
            time = self.needed[rest[0]]
            sets.append([node for node in rest if self.ready[node] <= time])
            rest = [node for node in rest if self.ready[node] > time]
        return sets


def levels(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes by how many others of them lie on the longest path up to each.

    Nodes of one level do not depend on each other, and what depends on a node is of a later level.
    So sets of nodes, each within a level, can be contracted all at once without making a cycle.

    Args:
        nodes: Nodes of one graph.

    Complexity: O(V + E) of the part of the graph between the first and the last of them.
    """
    found: dict[int, list[Node]] = defaultdict(list)
    wanted = set(nodes)
    height: dict[Node, int] = {}
    node, last = min(nodes), max(nodes)
    while True:
        level = max((height.get(each, 0) for each in node.all_input_nodes), default=0)
        if node in wanted:
            found[level].append(node)
            level += 1
        if level:
            height[node] = level
        if node is last:
            return [found[level] for level in sorted(found)]
        node = node.next


def _is_call(node: Node) -> bool:
    return node.op == "call_function" and not view_bases(node) and not is_fusible(node)
