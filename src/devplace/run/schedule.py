"""Lower a placement and an order to one checked instruction list per device."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from devplace.graph import Captured, OpGraph, as_captured
from devplace.run.order_check import check_order

InstructionKind = Literal["load", "call", "send", "receive"]


class Instruction(NamedTuple):
    """One thing a device does.

    Attributes:
        kind: `load` a source, `call` an op, `send` to or `receive` from another device.
        node: FX node of the value it makes or sends.
        transfer: Index into `Schedule.transfers` for `send` and `receive`, else -1.
    """

    kind: InstructionKind
    node: Any
    transfer: int = -1


class PlannedTransfer(NamedTuple):
    """A tensor that crosses from device `src` to device `dst` once per step.

    Attributes:
        tensor: Id of the tensor in the graph.
        src: Index of the sender.
        dst: Index of the receiver.
        num_bytes: What crosses, bytes.
    """

    tensor: int
    src: int
    dst: int
    num_bytes: int


@dataclass(frozen=True)
class Schedule:
    """What every device does in a step.

    Attributes:
        graph: The captured step.
        device_names: Names of the devices.
        device_of_op: Device index per op of the graph.
        instructions: Per device, in the order it runs them.
        transfers: All copies between devices in one step.
        holders: Source op -> devices that hold a copy of it before the step.
        results: Per device, the results found there after the step: (result index, FX node).
        borrowed: Indices of results that share memory with a source and must be copied.
    """

    graph: Captured
    device_names: tuple[str, ...]
    device_of_op: tuple[int, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    transfers: tuple[PlannedTransfer, ...]
    holders: Mapping[int, tuple[int, ...]]
    results: tuple[tuple[tuple[int, Any], ...], ...]
    borrowed: frozenset[int]


def stored_sources(schedule: Schedule) -> frozenset[int]:
    """Sources that keep their values between steps: all but inputs and scalars."""
    ops = schedule.graph.ops
    return frozenset(op for op in schedule.holders if ops[op].role not in ("input", "scalar"))


def source_bytes(schedule: Schedule, device: int) -> dict[int, int]:
    """Source op that a device holds -> bytes of its value."""
    graph = schedule.graph
    return {
        op: graph.tensors[graph.ops[op].outputs[0]].num_bytes
        for op, devices in schedule.holders.items()
        if device in devices
    }


def make_schedule(
    graph: OpGraph,
    device_of_op: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
) -> Schedule:
    """Work out what every device loads, computes, sends and receives, and in which order.

    A tensor crosses at most once per consumer device, as soon as it is made. A view of its whole
    base is rebuilt on the consumer from the base; a partial view crosses as its own copy. Sources
    that no result replaces are held by every device that reads them and never cross.

    Args:
        graph: The captured step.
        device_of_op: Device index per op; views sit with their base, sources on their home.
            Shape `[V]`.
        order: Per device the indices of its ops (no sources, no views) in execution order.
        device_names: Names of the devices, shape `[D]`.

    Raises:
        InputError: The graph is data alone.
        PlanError: The order misses, repeats or misplaces an op, or together with the data
            dependencies forms a cycle; the message names two ops.
    """
    graph = as_captured(graph, "To run it")
    facts = NodeFacts(graph, tuple(int(device) for device in device_of_op))
    check_order(graph, facts.device_of_op, order, tuple(device_names), facts.dependencies())
    found = _Lowering(facts, order, len(device_names), {})
    final = _Lowering(facts, order, len(device_names), found.first_need)
    transfers = tuple(
        PlannedTransfer(facts.tensor_id(node), facts.device(node), dst, facts.num_bytes(node))
        for node, dst in found.first_need
    )
    return Schedule(
        graph=graph,
        device_names=tuple(device_names),
        device_of_op=facts.device_of_op,
        instructions=tuple(tuple(instructions) for instructions in final.instructions),
        transfers=transfers,
        holders={op: tuple(sorted(devices)) for op, devices in final.holders.items()},
        results=tuple(tuple(results) for results in final.results),
        borrowed=frozenset(
            index
            for index, node in enumerate(facts.result_nodes)
            if graph.ops[facts.root(node)].is_source
        ),
    )


class NodeFacts:
    """What the graph says about each FX node."""

    def __init__(self, graph: Captured, device_of_op: tuple[int, ...]) -> None:
        program = graph.program
        self.graph = graph
        self.device_of_op = device_of_op
        self._tensor_of = program.tensor_of
        nodes = list(program.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.op_of: dict[Any, int] = {
            node: binding.op for node, binding in zip(placeholders, program.bindings, strict=True)
        }
        calls = [node for node in nodes if node.op == "call_function"]
        self.op_of.update((node, program.op_of[node.name]) for node in calls)
        self.nodes_of: dict[int, list[Any]] = {}
        for node in placeholders + calls:
            self.nodes_of.setdefault(self.op_of[node], []).append(node)
        self.result_nodes: list[Any] = list(nodes[-1].args[0])
        self._owner: dict[Any, Any] = {}

    def device(self, node: Any) -> int:
        return self.device_of_op[self.op_of[node]]

    def tensor_id(self, node: Any) -> int:
        op = self.graph.ops[self.op_of[node]]
        return op.outputs[0] if op.is_source else int(self._tensor_of[node.name])

    def num_bytes(self, node: Any) -> int:
        return self.graph.tensors[self.tensor_id(node)].num_bytes

    def is_view(self, node: Any) -> bool:
        return self.graph.ops[self.op_of[node]].is_view

    def root(self, node: Any) -> int:
        """Index of the op that owns the node's storage: the op itself, or that of a view's base."""
        return self.op_of[self.owner(node)]

    def owner(self, node: Any) -> Any:
        """The node whose value owns the node's storage: itself, or the base of a view."""
        chain = []
        while node not in self._owner:
            chain.append(node)
            if not self.is_view(node):
                self._owner[node] = node
                break
            node = self._base(node)
        owner = self._owner[node]
        self._owner.update(dict.fromkeys(chain, owner))
        return owner

    def _base(self, node: Any) -> Any:
        if node.target is operator.getitem:
            return node.args[0]
        alias = self.graph.ops[self.op_of[node]].alias_of
        for arg in node.all_input_nodes:
            if self.op_of[arg] == self.op_of[node]:
                return arg
            has_tensor = arg.name in self._tensor_of or arg.op == "placeholder"
            if has_tensor and self.tensor_id(arg) == alias:
                return arg
        return node.all_input_nodes[0]

    def is_read_only(self, op: int) -> bool:
        return self.graph.ops[op].is_source and op not in self.graph.replaced

    def is_rebuilt(self, node: Any) -> bool:
        """Whether another device rebuilds this value from its inputs instead of receiving it."""
        if not self.is_view(node):
            return False
        if node.name not in self._tensor_of:
            return True  # a tuple of views never crosses; its parts do, or it is rebuilt for them
        if self.is_read_only(self.root(node)):
            return True
        if "as_strided" in str(node.target):
            return False  # its strides refer to the original storage, a copy may be laid out anew
        alias = self.graph.ops[self.op_of[node]].alias_of
        return self.num_bytes(node) >= self.graph.tensors[alias].num_bytes

    def dependencies(self) -> list[list[int]]:
        """Per op the ops (no sources, no views) whose results it needs."""
        needs: list[list[int]] = [[] for _ in self.graph.ops]
        for op, nodes in self.nodes_of.items():
            if self.graph.ops[op].is_source or self.graph.ops[op].is_view:
                continue
            roots = {self.root(arg) for node in nodes for arg in node.all_input_nodes} - {op}
            needs[op] = sorted(root for root in roots if not self.graph.ops[root].is_source)
        return needs


class _Lowering:
    """One pass over the order. The first pass finds the transfers, the second also sends them."""

    def __init__(
        self,
        facts: NodeFacts,
        order: Sequence[Sequence[int]],
        num_devices: int,
        known: Mapping[tuple[Any, int], int],
    ) -> None:
        self.facts = facts
        self.instructions: list[list[Instruction]] = [[] for _ in range(num_devices)]
        self.first_need: dict[tuple[Any, int], int] = {}
        self.results: list[list[tuple[int, Any]]] = [[] for _ in range(num_devices)]
        self.holders: dict[int, set[int]] = {}
        self._index = {key: index for index, key in enumerate(known)}
        self._sends: dict[int, list[tuple[int, Any, int]]] = {}
        for (node, dst), position in known.items():
            self._sends.setdefault(facts.root(node), []).append((position, node, dst))
        self._present: list[set[Any]] = [set() for _ in range(num_devices)]
        self._source_sends()
        for device, ops in enumerate(order):
            for op in ops:
                self._run_op(device, op)
        self._finish()

    def _source_sends(self) -> None:
        for op, record in enumerate(self.facts.graph.ops):
            if record.is_source:
                self.holders[op] = set()
                self._send_results_of(self.facts.device_of_op[op], op)

    def _run_op(self, device: int, op: int) -> None:
        for node in self.facts.nodes_of.get(op, ()):
            for arg in node.all_input_nodes:
                self._need(device, arg)
            self._emit(device, Instruction("call", node))
        self._send_results_of(device, op)

    def _send_results_of(self, device: int, op: int) -> None:
        for _, node, dst in sorted(self._sends.get(op, ()), key=lambda send: (send[0], send[2])):
            self._need(device, node)
            index = self._index[node, dst]
            self.instructions[device].append(Instruction("send", node, index))

    def _need(self, device: int, node: Any) -> None:
        """Make the value of `node` present on `device`."""
        facts = self.facts
        if node in self._present[device]:
            return
        is_here = facts.device(node) == device
        if node.op == "placeholder" and (is_here or facts.is_read_only(facts.op_of[node])):
            self.holders[facts.op_of[node]].add(device)
            self._emit(device, Instruction("load", node))
        elif (is_here and facts.is_view(node)) or (not is_here and facts.is_rebuilt(node)):
            for arg in node.all_input_nodes:
                self._need(device, arg)
            self._emit(device, Instruction("call", node))
        else:
            self.first_need.setdefault((node, device), len(self.instructions[device]))
            index = self._index.get((node, device), -1)
            self._emit(device, Instruction("receive", node, index))

    def _emit(self, device: int, instruction: Instruction) -> None:
        self.instructions[device].append(instruction)
        self._present[device].add(instruction.node)

    def _finish(self) -> None:
        graph, facts = self.facts.graph, self.facts
        for index, (result, node) in enumerate(zip(graph.results, facts.result_nodes, strict=True)):
            home = facts.device(node)
            if result.replaces >= 0:
                home = facts.device_of_op[result.replaces]
            self._need(home, node)
            self.results[home].append((index, node))
        for op, devices in self.holders.items():
            if not facts.is_read_only(op) or not devices:
                devices.add(facts.device_of_op[op])
