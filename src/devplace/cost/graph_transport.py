"""Serialize a captured step for another process that measures it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from devplace.cost.source_values import Source
from devplace.errors import InputError
from devplace.graph import Captured, OpGraph
from devplace.graph.fx_data import NodeData, graph_from_data, nodes_as_data
from devplace.graph.program import Binding, Program


@dataclass(frozen=True)
class _Sent:
    graph: OpGraph
    nodes: list[NodeData]
    bindings: tuple[tuple[int, str, str, Any], ...]
    facts: dict[str, Any]
    sources: dict[int, Source]


def pack(graph: Captured, sources: Mapping[int, Source]) -> bytes:
    """A step with what its sources hold, as bytes.

    Args:
        graph: The captured step.
        sources: Of `step_sources` or `example_sources`.

    Raises:
        InputError: Something in the graph cannot be sent, such as an op that is a local function.
    """
    program = graph.program
    facts = {
        "tensor_of": dict(program.tensor_of),
        "op_of": dict(program.op_of),
        "random_ops": dict(program.random_ops),
        "layouts": dict(program.layouts),
        "training": program.training,
        "device": program.device,
    }
    bindings = tuple((b.op, b.kind, b.key, b.slot) for b in program.bindings)
    sent = _Sent(graph.graph, nodes_as_data(program.module.graph), bindings, facts, dict(sources))
    try:
        return pickle.dumps(sent, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(
            f"Graph {graph.name!r} cannot be sent to another process: "
            f"{str(error).splitlines()[0]}. Measure it in this one."
        ) from error


def unpack(data: bytes, keeps_unknown: bool = False) -> tuple[Captured, dict[int, Source]]:
    """What `pack` made bytes of; the program can be scheduled and run, not compiled.

    Args:
        data: Of `pack`.
        keeps_unknown: Whether ops that are not known here stay, as an `UnknownOp`.

    Raises:
        InputError: An op is not known in this process.
    """
    sent: _Sent = pickle.loads(data)
    bindings = tuple(Binding(op, kind, key, slot) for op, kind, key, slot in sent.bindings)  # type: ignore[arg-type]
    module = SimpleNamespace(graph=graph_from_data(sent.nodes, keeps_unknown))
    program = Program(module=module, bindings=bindings, scalars=lambda *_: {}, **sent.facts)
    graph = sent.graph
    found = Captured(
        graph.name, graph.ops, graph.tensors, graph.results, graph.meta, program=program
    )
    return found, sent.sources
