"""Integer tensors of a step computed from its batch, to time ops with real indices."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from devplace.cost.measuring_worker import begin
from devplace.cost.op_signature import INTEGERS
from devplace.cost.source_values import Source
from devplace.device_kinds import find_kind, is_accelerator
from devplace.graph import Captured

MAX_FLOPS, MAX_HOST_FLOPS = 10**12, 5 * 10**9
"""Of floating-point ops that are run because integers depend on them, on an accelerator and on the
host: about 0.1 s or less."""
MAX_BYTES = 2**29
"""Of floating-point values that are made for them, and kept while ops are timed."""


class StepValues:
    """Integers and bools of a captured step, made by running the ops that they come from.

    What depends on integers alone is always run; what depends on floating-point values too, such
    as the experts that a router chooses, as long as that is cheap. Large weights and inputs are
    made up (see `Source.make`), so such integers are valid, but others than in a real step.

    Args:
        graph: The captured step; it may come from `unpack`.
        sources: Source op -> what the step starts from.
        device: Where its ops are run: kernels of another type may give other integers.
    """

    def __init__(self, graph: Captured, sources: Mapping[int, Source], device: Any) -> None:
        self._graph = graph
        self._device = torch.device(device)
        program = graph.program
        self.nodes = {node.name: node for node in program.module.graph.nodes}
        placeholders = [n for n in program.module.graph.nodes if n.op == "placeholder"]
        bound = zip(placeholders, program.bindings, strict=True)
        self._op_of = {node: binding.op for node, binding in bound}
        self._sources = {node: sources.get(op) for node, op in self._op_of.items()}
        calls = (n for n in self.nodes.values() if n.op == "call_function")
        self._op_of.update((node, program.op_of[node.name]) for node in calls)
        self._order = {node: k for k, node in enumerate(program.module.graph.nodes)}
        self._values: dict[Any, Any] = {}  # None: cannot be known
        kind = find_kind(self._device.type)
        self._flops = 0 if kind is None else MAX_HOST_FLOPS if kind.is_host else MAX_FLOPS
        self._bytes = MAX_BYTES

    def inputs_of(self, name: str, faulty: Container[str] = ()) -> dict[int, Any]:
        """The integers and bools that an op reads, by place among its tensors.

        Args:
            name: FX node of the op.
            faulty: FX nodes that must not be run.

        Returns:
            Those that are known.
        """
        found = {}
        for place, node in enumerate(_arguments(self.nodes[name])):
            if self._is_wanted(node):
                value = self._value(node, faulty)
                if isinstance(value, torch.Tensor):
                    found[place] = value
        return found

    def _is_wanted(self, node: Any) -> bool:
        tensor = self._graph.program.tensor_of.get(node.name)
        return tensor is not None and self._graph.tensors[tensor].dtype in (*INTEGERS, "bool")

    def _value(self, wanted: Any, faulty: Container[str]) -> Any:
        """The value of a node; None if it is not to be had."""
        if wanted in self._values:
            return self._values[wanted]
        slice_ = self._slice(wanted)
        if any(node.name in faulty or self._is_unknown(node) for node in slice_):
            self._values[wanted] = None
        elif not self._is_paid(slice_, wanted):
            return None  # another one may be cheap enough
        for node in slice_:
            if node not in self._values:
                self._values[node] = self._made(node)
            if self._values[node] is None:
                self._values[wanted] = None
                break
        return self._values[wanted]

    def _slice(self, wanted: Any) -> list[Any]:
        """What must be run for a node and was not, itself included, in order."""
        found, stack = {wanted}, [wanted]
        while stack:
            for node in stack.pop().all_input_nodes:
                if node not in found and self._values.get(node) is None:
                    found.add(node)
                    stack.append(node)
        return sorted(found, key=self._order.__getitem__)

    def _is_unknown(self, node: Any) -> bool:
        if node in self._values:
            return self._values[node] is None
        if node.op != "placeholder":
            return bool(node.op != "call_function")
        source = self._sources[node]
        return source is None or (source.value is None and not _is_floating(source.dtype))

    def _is_paid(self, slice_: list[Any], wanted: Any) -> bool:
        """Whether running these is cheap enough; takes it from what is left."""
        ops, tensors = self._graph.ops, self._graph.tensors
        used = [ops[op] for op in {self._op_of[node] for node in slice_}]
        outputs = [tensors[tensor] for op in used for tensor in op.outputs]
        floating = [tensor for tensor in outputs if _is_floating(tensor.dtype)]
        if not floating:
            return True
        flops = sum(op.flops for op in used)
        num_bytes = sum(tensor.num_bytes for tensor in outputs)
        is_bool = tensors[self._graph.program.tensor_of[wanted.name]].dtype == "bool"
        if is_bool or flops > self._flops or num_bytes > self._bytes:
            return False  # any bools do
        self._flops -= flops
        self._bytes -= num_bytes
        return True

    def _made(self, node: Any) -> Any:
        begin(node.name)
        if node.op == "placeholder":
            return self._sources[node].make(self._device)  # type: ignore[union-attr]
        try:
            with torch.no_grad():
                made = node.target(
                    *torch.fx.node.map_aggregate(node.args, self._argument),
                    **torch.fx.node.map_aggregate(node.kwargs, self._argument),
                )
            if is_accelerator(self._device.type):
                torch.cuda.synchronize(self._device)
        except Exception:  # whatever an op of the user's raises
            return None
        return made

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self._values[arg]
        return self._device if isinstance(arg, torch.device) else arg


def _is_floating(dtype: str) -> bool:
    return dtype not in (*INTEGERS, "bool")


def _arguments(node: Any) -> list[Any]:
    """Tensors among the arguments of a node, each as often as it is there."""
    found: list[Any] = []
    torch.fx.node.map_arg((node.args, node.kwargs), found.append)
    return found
