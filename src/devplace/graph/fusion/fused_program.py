"""Build the FX graph of a fused step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from devplace.graph.captured import Captured
from devplace.graph.fusion.call import FusedCall
from devplace.graph.fusion.group import Group, Unit
from devplace.graph.graph import OpGraph
from devplace.graph.overwrite import overwritten_sources
from devplace.graph.program import Layouts, Program, layouts_of

aten = torch.ops.aten
# In a group layouts are the compiler's, so what was a view in the trace may need a copy.
_ANY_LAYOUT = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}


def fused_program(
    graph: Captured, units: Sequence[Unit], fused: OpGraph, tensor_of: Mapping[int, int]
) -> Program:
    """The program of a fused graph.

    Args:
        graph: The plain step, captured.
        units: Its groups and the ops that stay, in their new order.
        fused: The records of the fused step, one op per unit.
        tensor_of: Tensor of the plain step -> the same one of the fused step.
    """
    old: Program = graph.program
    made = _Fusing(graph, fused, tensor_of)
    for index, unit in enumerate(units):
        if isinstance(unit, int):
            made.keep(index, unit)
        else:
            made.call(index, unit)
    made.finish()
    home = {unit: index for index, unit in enumerate(units) if isinstance(unit, int)}
    bindings = {binding.op: binding for binding in old.bindings}
    return replace(
        old,
        module=SimpleNamespace(graph=made.graph),
        bindings=tuple(replace(bindings[u], op=k) for u, k in home.items() if u in bindings),
        tensor_of=made.tensor_of,
        op_of=made.op_of,
        random_ops={made.names.get(name, name): k for name, k in old.random_ops.items()},
        layouts=made.layouts,
    )


@dataclass(frozen=True)
class _Nodes:
    """FX nodes of a captured step by op and by tensor."""

    of_op: Mapping[int, list[Any]]
    of_tensor: Mapping[int, Any]

    @classmethod
    def of(cls, graph: Captured) -> _Nodes:
        program = graph.program
        bindings = iter(program.bindings)
        of_op: dict[int, list[Any]] = {}
        of_tensor: dict[int, Any] = {}
        for node in program.module.graph.nodes:
            if node.op == "placeholder":
                index = next(bindings).op
                of_tensor[graph.ops[index].outputs[0]] = node
            elif node.op == "call_function":
                index = program.op_of[node.name]
                if node.name in program.tensor_of:
                    of_tensor.setdefault(program.tensor_of[node.name], node)
            else:
                continue
            of_op.setdefault(index, []).append(node)
        return cls(of_op, of_tensor)


class _Fusing:
    def __init__(self, graph: Captured, fused: OpGraph, tensor_of: Mapping[int, int]) -> None:
        self.graph = torch.fx.Graph()
        self.tensor_of: dict[str, int] = {}
        self.op_of: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self.layouts: dict[str, Layouts] = {}
        self._plain, self._fused = graph, fused
        self._tensor_of = tensor_of
        new = {tensor: old for old, tensor in tensor_of.items()}
        self._over = {  # new value -> the one it may be written over
            new[tensor]: new[fused.ops[source].outputs[0]]
            for tensor, source in overwritten_sources(fused).items()
        }
        self._nodes = _Nodes.of(graph)
        self._values: dict[Any, Any] = {}
        self._calls: dict[str, FusedCall] = {}

    def keep(self, index: int, op: int) -> None:
        """An op that stays: its call and the parts that are read of it."""
        for node in self._nodes.of_op[op]:
            made = self.graph.node_copy(node, lambda other: self._values[other])
            self._values[node] = made
            self.names[node.name] = made.name
            if node.name in self._plain.program.layouts:
                self.layouts[made.name] = self._plain.program.layouts[node.name]
            if node.op == "placeholder":
                self.op_of[made.name] = index
                self.tensor_of[made.name] = self._fused.ops[index].outputs[0]
                continue
            self.op_of[made.name] = index
            if node.name in self._plain.program.tensor_of:
                old = self._plain.program.tensor_of[node.name]
                self.tensor_of[made.name] = self._tensor_of[old]

    def call(self, index: int, group: Group) -> None:
        """The call of a group, and its outputs."""
        inputs = [self._nodes.of_tensor[tensor] for tensor in group.inputs]
        outputs = [self._nodes.of_tensor[tensor] for tensor in group.outputs]
        over = tuple(
            (k, group.inputs.index(self._over[tensor]))
            for k, tensor in enumerate(group.outputs)
            if tensor in self._over
        )
        target = FusedCall(self._sub_graph(group, inputs, outputs), over)
        target = self._calls.setdefault(target.name, target)
        call = self.graph.create_node(
            "call_function", target, tuple(self._values[node] for node in inputs), {}, group.name
        )
        values = tuple(node.meta["val"] for node in outputs)
        call.meta.update(val=values[0] if len(values) == 1 else values)
        self.layouts[call.name] = layouts_of(values)
        self.op_of[call.name] = index
        for place, node in enumerate(outputs):
            made = call
            if len(outputs) > 1:
                made = self.graph.call_function(operator.getitem, (call, place))
                made.meta["val"] = node.meta["val"]
                self.op_of[made.name] = index
            self.tensor_of[made.name] = self._fused.ops[index].outputs[place]
            self._values[node] = made

    def finish(self) -> None:
        """The results, as they were."""
        output = next(n for n in reversed(self._plain.program.module.graph.nodes))
        self.graph.output([self._values[node] for node in output.args[0]])

    def _sub_graph(
        self, group: Group, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        values = {node: graph.placeholder(f"in_{k}") for k, node in enumerate(inputs)}
        for op in group.members:
            for node in self._nodes.of_op[op]:
                made = graph.node_copy(node, lambda other: values[other])
                made.target = _ANY_LAYOUT.get(made.target, made.target)
                values[node] = made
        graph.output(tuple(values[node] for node in outputs))
        graph.eliminate_dead_code()
        return graph
