"""A captured step as bytes, for another process that measures it.

torch.fx pickles a graph as source code and traces it again, which is slow and renames nodes, and
op overloads do not pickle at all; so nodes travel as a plain list.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from devplace.auto.sources import Source
from devplace.errors import InputError
from devplace.graph import OpGraph
from devplace.graph.program import Binding, Program


@dataclass(frozen=True)
class _Ref:
    """Stands for a node of the graph."""

    index: int


@dataclass(frozen=True)
class _Op:
    """Stands for an op overload such as `aten::mm` `default`."""

    name: str
    overload: str


@dataclass(frozen=True)
class _Sent:
    graph: OpGraph
    nodes: list[tuple[str, str, Any, Any, Any]]
    bindings: tuple[tuple[int, str, str, Any], ...]
    facts: dict[str, Any]
    sources: dict[int, Source]


def pack(graph: OpGraph, sources: Mapping[int, Source]) -> bytes:
    """A step with what its sources hold, as bytes.

    Args:
        graph: The captured step.
        sources: Of `step_sources`.

    Raises:
        InputError: Something in the graph cannot be sent, such as an op that is a local function.
    """
    program = graph.program
    facts = {
        "tensor_of": dict(program.tensor_of),
        "op_of": dict(program.op_of),
        "random_ops": program.random_ops,
        "training": program.training,
        "device": program.device,
    }
    bindings = tuple((b.op, b.kind, b.key, b.slot) for b in program.bindings)
    plain = dataclasses.replace(graph, program=None)
    sent = _Sent(plain, _nodes_out(program.module.graph), bindings, facts, dict(sources))
    try:
        return pickle.dumps(sent, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(
            f"Graph {graph.name!r} cannot be sent to another process: "
            f"{str(error).splitlines()[0]}. Measure it in this one."
        ) from error


def unpack(data: bytes) -> tuple[OpGraph, dict[int, Source]]:
    """What `pack` made bytes of; the program can be scheduled and run, not compiled.

    Raises:
        InputError: An op is not known in this process.
    """
    sent: _Sent = pickle.loads(data)
    bindings = tuple(Binding(op, kind, key, slot) for op, kind, key, slot in sent.bindings)  # type: ignore[arg-type]
    module = SimpleNamespace(graph=_nodes_in(sent.nodes))
    program = Program(module=module, bindings=bindings, scalars=lambda *_: {}, **sent.facts)
    return dataclasses.replace(sent.graph, program=program), sent.sources


def _nodes_out(graph: Any) -> list[tuple[str, str, Any, Any, Any]]:
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


def _nodes_in(nodes: list[tuple[str, str, Any, Any, Any]]) -> Any:
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
