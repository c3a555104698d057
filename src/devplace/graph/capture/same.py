"""Whether a step that is traced once more, after it has run, is still the same one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from devplace.graph.capture.analysis import is_random, results
from devplace.graph.capture.sources import memory

Pair = tuple[Node, Node]


def is_same_step(
    before: torch.fx.GraphModule,
    after: torch.fx.GraphModule,
    left: Sequence[torch.Tensor],
    steady: Collection[int],
) -> bool:
    """Whether two traces compute the same; the second may read what the first has left behind.

    What was left must depend on nothing that changes from step to step: then the first trace makes
    anew in every step what the second takes from a cache.

    Args:
        before: Functional graph of a step; its last results are what it leaves.
        after: Of the next step.
        left: Stand-ins for what was left; constants of the second graph.
        steady: Places of inputs that never change.
    """
    return _Comparison(before, after, left, steady).agrees()


def reads_array(gm: torch.fx.GraphModule, array: Any) -> bool:
    """Whether a constant of a graph lies in the memory of an array of NumPy."""
    begin = array.__array_interface__["data"][0]
    constants = (getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr")
    return any(
        isinstance(each, torch.Tensor)
        and each.device.type == "cpu"
        and begin <= each.data_ptr() < begin + array.nbytes
        for each in constants
    )


class _Comparison:
    def __init__(
        self,
        before: torch.fx.GraphModule,
        after: torch.fx.GraphModule,
        left: Sequence[torch.Tensor],
        steady: Collection[int],
    ) -> None:
        self._before, self._after = before, after
        given = results(before)
        self._results, made = given[: len(given) - len(left)], given[len(given) - len(left) :]
        self._left = {memory(t): node for t, node in zip(left, made, strict=True)}
        self._place = [_places(gm) for gm in (before, after)]
        self._draws = [_draws(gm) for gm in (before, after)]
        self._steady = _steady_nodes(before, steady)

    def agrees(self) -> bool:
        """From the outputs back; every op of the second must have one of the first."""
        if len(self._draws[0]) != len(self._draws[1]):
            return False
        todo = list(zip(self._results, results(self._after), strict=False))
        partner: dict[Node, Node] = {}
        while todo:
            one, other = todo.pop()
            if other in partner:
                if partner[other] is not one:
                    return False
                continue
            partner[other] = one
            before = self._read_alike(one, other)
            if before is None:
                return False
            todo += before
        return True

    def _read_alike(self, one: Node, other: Node) -> list[Pair] | None:
        """What two nodes read, in pairs, if they do the same; else None."""
        if other.op == "get_attr":
            value = getattr(self._after, str(other.target))
            if isinstance(value, torch.Tensor) and memory(value) in self._left:
                is_it = self._left[memory(value)] is one
                return [] if is_it and one in self._steady else None
        if one.op != other.op:
            return None
        if one.op == "placeholder":
            return [] if self._place[0][one] == self._place[1][other] else None
        if one.op == "get_attr":
            values = getattr(self._before, str(one.target)), getattr(self._after, str(other.target))
            return [] if values[0] is values[1] or _is_equal(*values) else None
        inputs, texts = zip(*(_inputs(node) for node in (one, other)), strict=True)
        is_alike = texts[0] == texts[1] and one.target is other.target
        is_alike = is_alike and self._draws[0].get(one) == self._draws[1].get(other)
        return list(zip(*inputs, strict=True)) if is_alike else None


def _places(gm: torch.fx.GraphModule) -> dict[Node, int]:
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return {node: place for place, node in enumerate(inputs)}


def _draws(gm: torch.fx.GraphModule) -> dict[Node, int]:
    """Random ops, in the order in which they draw."""
    return {node: k for k, node in enumerate(filter(is_random, gm.graph.nodes))}


def _steady_nodes(gm: torch.fx.GraphModule, steady: Collection[int]) -> set[Node]:
    """Nodes that have the same value in every step."""
    places, found = _places(gm), set()
    for node in gm.graph.nodes:
        is_constant = node.op == "get_attr" or places.get(node, -1) in steady
        is_made = node.op == "call_function" and not is_random(node)
        if is_constant or (is_made and all(each in found for each in node.all_input_nodes)):
            found.add(node)
    return found


def _inputs(node: Node) -> tuple[list[Node], str]:
    """The nodes that a node reads, one after another, and a text of what else it is given."""
    read: list[Node] = []

    def hole(each: Node) -> str:
        read.append(each)
        return "%"

    return read, f"{map_arg((node.args, dict(node.kwargs)), hole)}"


def _is_equal(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.dtype == other.dtype and torch.equal(one, other)
