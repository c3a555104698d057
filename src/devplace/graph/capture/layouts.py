"""How tensors of a step lie in memory, where that decides how fast kernels are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from devplace.graph.capture.analysis import tensors_in

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.as_strided.default)


def propagate(graph: torch.fx.Graph, changed: Iterable[Node]) -> None:
    """Work out anew what lies otherwise because these nodes do; what was a view may need a copy.

    Args:
        graph: Nodes have fake values.
        changed: Nodes whose fake values have other strides than before.
    """
    others = set(changed)
    for node in list(graph.nodes):
        if node.op != "call_function" or others.isdisjoint(node.all_input_nodes):
            continue
        before = _strides(node.meta["val"])
        if node.target is aten.as_strided.default:
            _copy_input(graph, node)
        try:
            value = fake_call(node)
        except (RuntimeError, ValueError):  # torch raises one or the other
            if node.target not in _VIEWS:
                raise
            _copy_input(graph, node)
            value = fake_call(node)
        node.meta["val"] = value
        if _strides(value) != before:
            others.add(node)


def fake_call(node: Node) -> Any:
    """The fake value of a call from those of its inputs."""

    def value(arg: Node) -> Any:
        return arg.meta["val"]

    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    mode = next(t.fake_mode for n in node.all_input_nodes for t in tensors_in(n.meta["val"]))
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)


def _copy_input(graph: torch.fx.Graph, node: Node) -> None:
    """Give a view a contiguous copy of its base."""
    base: Any = node.args[0]
    with graph.inserting_before(node):
        copy = graph.call_function(
            aten.clone.default, (base,), {"memory_format": torch.contiguous_format}
        )
    copy.meta["tag"] = node.meta["tag"]
    copy.meta["val"] = fake_call(copy)
    node.args = (copy, *node.args[1:])


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.stride()) for tensor in tensors_in(value)]
