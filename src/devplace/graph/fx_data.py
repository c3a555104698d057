"""FX graphs as plain data, for other processes and for keys.

torch.fx pickles a graph as source code and traces it again, which is slow and renames nodes, and
op overloads do not pickle at all; so nodes travel as a plain list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from devplace.errors import InputError

NodeData = tuple[str, str, Any, Any, Any]
"""Kind, name, target, arguments and named arguments of a node."""


@dataclass(frozen=True)
class _Ref:
    """Stands for a node of the graph."""

    index: int


@dataclass(frozen=True)
class _Op:
    """Stands for an op overload such as `aten::mm` `default`."""

    name: str
    overload: str


def nodes_as_data(graph: torch.fx.Graph) -> list[NodeData]:
    """The nodes of a graph, in order; what they carry in `meta` is left out."""
    index = {node: k for k, node in enumerate(graph.nodes)}

    def plain(arg: Any) -> Any:
        return _Ref(index[arg]) if isinstance(arg, torch.fx.Node) else arg

    return [
        (
            node.op,
            node.name,
            _target_out(node.target),
            torch.fx.node.map_aggregate(node.args, plain),
            torch.fx.node.map_aggregate(node.kwargs, plain),
        )
        for node in graph.nodes
    ]


def graph_from_data(nodes: list[NodeData]) -> torch.fx.Graph:
    """The graph that `nodes_as_data` made data of.

    Raises:
        InputError: An op is not known in this process.
    """
    graph = torch.fx.Graph()
    made: list[Any] = []

    def resolved(arg: Any) -> Any:
        return made[arg.index] if isinstance(arg, _Ref) else arg

    for kind, name, target, args, kwargs in nodes:
        args = torch.fx.node.map_aggregate(args, resolved)
        kwargs = torch.fx.node.map_aggregate(kwargs, resolved)
        node = graph.create_node(kind, _target_in(target), args, dict(kwargs), name)
        node.name = name
        made.append(node)
    return graph


def _target_out(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        return _Op(target._schema.name, target._overloadname)
    return target


def _target_in(target: Any) -> Any:
    if not isinstance(target, _Op):
        return target
    namespace, _, name = target.name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        return getattr(packet, target.overload)
    except AttributeError as error:
        raise InputError(
            f"Op {target.name}.{target.overload} is not known in a fresh process: it was "
            "registered by your code. Measure in this process."
        ) from error
