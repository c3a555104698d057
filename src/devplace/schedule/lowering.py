"""Lower a placement and an order to one checked instruction list per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from devplace.errors import PlanError
from devplace.graph import OpGraph
from devplace.schedule.order import order_fault
from devplace.schedule.schedule import Instruction, InstructionKind, PlannedTransfer, Schedule


def make_schedule(
    graph: OpGraph,
    device_of_op: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
) -> Schedule:
    """Work out what every device loads, computes, sends and receives, and in which order.

    A tensor crosses at most once per consumer device, as soon as it is made. A view of its whole
    base is made again on the consumer from the base; a view of a part crosses as its own copy.
    Sources that no result replaces are held by every device that reads them and never cross.

    Args:
        graph: The step.
        device_of_op: Device index per op; views sit with their base, sources on their home.
            Shape `[V]`.
        order: Per device the indices of its ops (no sources, no views) in execution order.
        device_names: Names of the devices, shape `[D]`.

    Raises:
        PlanError: The order misses, repeats or misplaces an op, or together with the data
            dependencies forms a cycle; the message names two ops.

    Complexity: O(V + E).
    """
    fault = order_fault(graph, device_of_op, order, device_names)
    if fault:
        raise PlanError(fault)
    devices = tuple(int(device) for device in device_of_op)
    found = _Lowering(graph, devices, order, len(device_names))
    final = _Lowering(graph, devices, order, len(device_names), found.first_need)
    return Schedule(
        graph=graph,
        device_names=tuple(device_names),
        device_of_op=devices,
        instructions=tuple(tuple(instructions) for instructions in final.instructions),
        transfers=tuple(
            PlannedTransfer(
                tensor, devices[graph.producer[tensor]], dst, graph.tensors[tensor].num_bytes
            )
            for tensor, dst in found.first_need
        ),
        holders={op: tuple(sorted(holders)) for op, holders in final.holders.items()},
        results=tuple(tuple(results) for results in final.results),
        borrowed=frozenset(
            index
            for index, result in enumerate(graph.results)
            if graph.ops[graph.producer[graph.storage[result.tensor]]].is_source
        ),
    )


class _Lowering:
    """One pass over the order. The first finds the transfers, the second writes it all down."""

    def __init__(
        self,
        graph: OpGraph,
        device_of_op: tuple[int, ...],
        order: Sequence[Sequence[int]],
        num_devices: int,
        known: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self.instructions: list[list[Instruction]] = [[] for _ in range(num_devices)]
        self.first_need: dict[tuple[int, int], int] = {}
        self.results: list[list[tuple[int, int]]] = [[] for _ in range(num_devices)]
        self.holders: dict[int, set[int]] = {}
        self._graph = graph
        self._producer, self._storage, self._carrier = graph.producer, graph.storage, graph.carrier
        self._device_of_op = device_of_op
        self._is_first, known = known is None, known or {}
        self._index = {key: index for index, key in enumerate(known)}
        self._is_read_only = [
            op.is_source and i not in graph.replaced for i, op in enumerate(graph.ops)
        ]
        self._num_instructions = [0] * num_devices
        self._sends: dict[int, list[tuple[int, int, int]]] = {}
        for (tensor, dst), position in known.items():
            owner = self._producer[self._storage[tensor]]
            self._sends.setdefault(owner, []).append((position, dst, tensor))
        self._present: list[set[int]] = [set() for _ in range(num_devices)]
        for op, record in enumerate(graph.ops):
            if record.is_source:
                self.holders[op] = set()
                self._send_results_of(device_of_op[op], op)
        for device, ops in enumerate(order):
            for op in ops:
                self._call(device, op)
                self._send_results_of(device, op)
        self._finish()

    def _write(self, device: int, kind: InstructionKind, what: int, transfer: int = -1) -> None:
        self._num_instructions[device] += 1
        if not self._is_first:
            self.instructions[device].append(Instruction(kind, what, transfer))

    def _send_results_of(self, device: int, op: int) -> None:
        for _, dst, tensor in sorted(self._sends.get(op, ())):
            self._need(device, tensor)
            self._write(device, "send", tensor, self._index[tensor, dst])

    def _call(self, device: int, op: int) -> None:
        record = self._graph.ops[op]
        for tensor in record.inputs:
            if tensor not in self._present[device]:
                self._need(device, tensor)
        self._write(device, "call", op)
        self._present[device].update(record.outputs)

    def _need(self, device: int, tensor: int) -> None:
        """Make a tensor present on a device."""
        if tensor in self._present[device]:
            return
        op = self._producer[tensor]
        record, is_here = self._graph.ops[op], self._device_of_op[op] == device
        if record.is_source and (is_here or self._is_read_only[op]):
            self.holders[op].add(device)
            self._write(device, "load", tensor)
        elif record.is_view and (is_here or self._is_made_again(tensor)):
            self._call(device, op)
        else:
            self.first_need[tensor, device] = self._num_instructions[device]
            self._write(device, "receive", tensor, self._index.get((tensor, device), -1))
        self._present[device].add(tensor)

    def _is_made_again(self, view: int) -> bool:
        """Whether another device makes a view again from its base instead of receiving it."""
        is_read_only = self._is_read_only[self._producer[self._storage[view]]]
        return is_read_only or self._carrier[view] != view

    def _finish(self) -> None:
        for index, result in enumerate(self._graph.results):
            home = self._device_of_op[self._producer[result.tensor]]
            if result.replaces >= 0:
                home = self._device_of_op[result.replaces]
            self._need(home, result.tensor)
            self.results[home].append((index, result.tensor))
        for op, devices in self.holders.items():
            if not self._is_read_only[op] or not devices:
                devices.add(self._device_of_op[op])
