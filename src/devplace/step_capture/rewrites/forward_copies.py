"""Copy forward ops for the backward pass, each right before its first reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from devplace.step_capture.cleanup import remove_dead
from devplace.step_capture.rewrites.readers import Readers
from devplace.step_capture.tags import recomputed

Node: TypeAlias = torch.fx.Node


class Copies:
    """Makes readers in the backward pass read copies of forward values.

    Readers of equal depth share copies, for they can be one kernel.

    Args:
        graph: The graph that is changed.
        readers: Of the graph.
        region: Op -> index of its region.
        wanted: Region -> its values that the backward pass may read as copies, and for whom.
        repeated: Region -> values that are computed again.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        readers: Readers,
        region: Mapping[Node, int],
        wanted: Sequence[Mapping[Node, Sequence[Node]]],
        repeated: Sequence[set[Node]],
    ) -> None:
        self._graph = graph
        self._readers = readers
        self._region = region
        self._repeated = repeated
        self._copied = {
            value: want
            for values, again in zip(wanted, repeated, strict=True)
            for value, want in values.items()
            if value in again
        }
        self._made: dict[tuple[int, int], dict[Node, Node]] = {}

    def make(self) -> None:
        """Copy for every reader in turn, and drop what nothing reads any more."""
        for reader in sorted({each for want in self._copied.values() for each in want}):
            for value in self._readers.inputs[reader]:
                if value in self._copied and reader in self._copied[value]:
                    self._give_copy(reader, value)
        remove_dead(self._graph)

    def _give_copy(self, reader: Node, value: Node) -> None:
        """Let an op read a copy of a value, and of the views through which it reads it."""
        key = self._region[self._readers.maker(value)], self._readers.depth[reader]
        made = self._made.setdefault(key, {})
        given = [node for node in reader.all_input_nodes if self._readers.value.get(node) is value]
        for node in sorted(self._needed(given, key[0]) - made.keys()):
            with self._graph.inserting_before(reader):
                copy = self._graph.node_copy(node, lambda arg: made.get(arg, arg))
            copy.meta["tag"] = recomputed(node.meta["tag"])
            made[node] = copy
        for node in given:
            reader.replace_input_with(node, made[node])

    def _needed(self, given: list[Node], region: int) -> set[Node]:
        """Ops, items and views that must be copied so that these nodes can be."""
        needed: set[Node] = set()
        todo = list(given)
        while todo:
            node = todo.pop()
            if node in needed or not self._is_repeated(node, region):
                continue
            needed.add(node)
            todo += node.all_input_nodes
        return needed

    def _is_repeated(self, node: Node, region: int) -> bool:
        """Whether a node is copied where the region's values are computed again."""
        values = self._readers.made.get(node, [self._readers.value[node]])
        return any(value in self._repeated[region] for value in values)
