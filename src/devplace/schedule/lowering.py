"""Lower a placement and an order to one checked instruction list per device."""

from __future__ import annotations

from collections.abc import Sequence

from devplace.errors import PlanError
from devplace.graph import OpGraph
from devplace.schedule.order import order_fault
from devplace.schedule.schedule import Instruction, PlannedTransfer, Schedule


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
    return lower(graph, device_of_op, order, device_names)


def lower(
    graph: OpGraph,
    device_of_op: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
) -> Schedule:
    """As `make_schedule`, of an order that is known to run."""
    devices = tuple(int(device) for device in device_of_op)
    found = _Lowering(graph, devices, order, len(device_names))
    lists = [found.with_sends(device) for device in range(len(device_names))]
    return Schedule(
        graph=graph,
        device_names=tuple(device_names),
        device_of_op=devices,
        instructions=tuple(tuple(instructions) for instructions in lists),
        transfers=tuple(
            PlannedTransfer(
                tensor, devices[graph.producer[tensor]], dst, graph.tensors[tensor].num_bytes
            )
            for tensor, dst in found.first_need
        ),
        holders={op: tuple(sorted(holders)) for op, holders in found.holders.items()},
        results=tuple(tuple(results) for results in found.results),
        borrowed=frozenset(
            index
            for index, result in enumerate(graph.results)
            if graph.ops[graph.producer[graph.storage[result.tensor]]].is_source
        ),
    )


class _Lowering:
    """What every device needs, in its order; then, when all is known, what it has to send."""

    def __init__(
        self,
        graph: OpGraph,
        device_of_op: tuple[int, ...],
        order: Sequence[Sequence[int]],
        num_devices: int,
    ) -> None:
        self.first_need: dict[tuple[int, int], int] = {}
        self.results: list[list[tuple[int, int]]] = [[] for _ in range(num_devices)]
        self._sources = [op for op, record in enumerate(graph.ops) if record.is_source]
        self.holders: dict[int, set[int]] = {op: set() for op in self._sources}
        self._graph, self._device_of_op = graph, device_of_op
        self._producer, self._storage, self._carrier = graph.producer, graph.storage, graph.carrier
        self._read_only = self.holders.keys() - graph.replaced.keys()
        self._instructions: list[list[Instruction]] = [[] for _ in range(num_devices)]
        self._present: list[set[int]] = [set() for _ in range(num_devices)]
        for device, ops in enumerate(order):
            for op in ops:
                self._call(device, op)
        self._finish()
        self._index = {key: index for index, key in enumerate(self.first_need)}
        self._sends: dict[int, list[tuple[int, int, int, int]]] = {}
        for index, ((tensor, dst), position) in enumerate(self.first_need.items()):
            owner = self._producer[self._storage[tensor]]
            self._sends.setdefault(owner, []).append((position, dst, tensor, index))

    def with_sends(self, device: int) -> list[Instruction]:
        """The instructions of a device: what it makes is sent at once, to who needs it first."""
        done = _Sending(self._graph)
        for op in self._sources:
            if self._device_of_op[op] == device:
                done.send(self._sends.get(op, ()))
        for kind, what, _ in self._instructions[device]:
            if kind == "call":
                done.call(what)
                done.send(self._sends.get(what, ()))
            elif kind == "receive":
                done.instructions.append(Instruction("receive", what, self._index[what, device]))
            elif what not in done.loaded:
                done.load(what)
        return done.instructions

    def _call(self, device: int, op: int) -> None:
        record, present = self._graph.ops[op], self._present[device]
        for tensor in record.inputs:
            if tensor not in present:
                self._need(device, tensor)
        self._instructions[device].append(Instruction("call", op))
        present.update(record.outputs)

    def _need(self, device: int, tensor: int) -> None:
        """Make a tensor present on a device."""
        if tensor in self._present[device]:
            return
        op = self._producer[tensor]
        is_here = self._device_of_op[op] == device
        if op in self.holders and (is_here or op in self._read_only):
            self.holders[op].add(device)
            self._instructions[device].append(Instruction("load", tensor))
        elif self._graph.ops[op].is_view and (is_here or self._is_made_again(tensor)):
            self._call(device, op)
        else:
            self.first_need[tensor, device] = len(self._instructions[device])
            self._instructions[device].append(Instruction("receive", tensor))
        self._present[device].add(tensor)

    def _is_made_again(self, view: int) -> bool:
        """Whether another device makes a view again from its base instead of receiving it."""
        owner = self._producer[self._storage[view]]
        return owner in self._read_only or self._carrier[view] != view

    def _finish(self) -> None:
        for index, result in enumerate(self._graph.results):
            home = self._device_of_op[self._producer[result.tensor]]
            if result.replaces >= 0:
                home = self._device_of_op[result.replaces]
            self._need(home, result.tensor)
            self.results[home].append((index, result.tensor))
        for op, devices in self.holders.items():
            if op not in self._read_only or not devices:
                devices.add(self._device_of_op[op])


class _Sending:
    """The instructions of one device, as sends are put between them."""

    def __init__(self, graph: OpGraph) -> None:
        self.instructions: list[Instruction] = []
        self.loaded: set[int] = set()
        self._called: set[int] = set()
        self._graph = graph

    def call(self, op: int) -> None:
        """Call an op, unless it is a view that a send needed before."""
        if op not in self._called:
            self._called.add(op)
            self.instructions.append(Instruction("call", op))

    def load(self, tensor: int) -> None:
        """Load a source."""
        self.loaded.add(tensor)
        self.instructions.append(Instruction("load", tensor))

    def send(self, sends: Sequence[tuple[int, int, int, int]]) -> None:
        """Send what an op made, views of it in between."""
        for _, _, tensor, index in sorted(sends):
            self._make(tensor)
            self.instructions.append(Instruction("send", tensor, index))

    def _make(self, tensor: int) -> None:
        op = self._graph.producer[tensor]
        record = self._graph.ops[op]
        if record.is_source and tensor not in self.loaded:
            self.load(tensor)
        elif record.is_view and op not in self._called:
            self._make(record.alias_of)
            self.call(op)
