"""Two ops for the two gradients of a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten


def split_convolution_gradients(graph: torch.fx.Graph) -> None:
    """Compute the gradients of a convolution by its input and by its weight in ops of their own.

    PyTorch has one op for both but a kernel for each, so that numbers and work stay the same. Only
    the former is waited for by the rest of the backward pass: the latter can run elsewhere. The
    gradient by the bias stays with that by the weight.

    Args:
        graph: A clean graph.
    """
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        of_input, of_weight, of_bias = node.args[10]
        if of_input and (of_weight or of_bias):
            with graph.inserting_before(node):
                halves = [
                    _masked(node, [True, False, False]),
                    _masked(node, [False, of_weight, of_bias]),
                ]
            for item in list(node.users):
                item.args = (halves[item.args[1] > 0], item.args[1])
            graph.erase_node(node)


def _masked(node: Node, mask: Sequence[bool]) -> Node:
    """The op once more, for some of its outputs."""
    args: Any = (*node.args[:10], list(mask))
    made = node.graph.call_function(node.target, args)
    made.meta["tag"] = node.meta["tag"]
    values = zip(node.meta["val"], mask, strict=True)
    made.meta["val"] = tuple(value if is_made else None for value, is_made in values)
    return made
