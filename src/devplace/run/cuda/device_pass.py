"""One device's instructions carried out one by one: eagerly, or while a CUDA graph records them."""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch

from devplace.errors import ExecutionError
from devplace.run.codegen import last_uses
from devplace.run.cuda.clock import Clock
from devplace.run.cuda.random import RandomOps
from devplace.run.schedule import Schedule


class Carrier(Protocol):
    """Brings tensors from device to device."""

    def send(self, transfer: int, value: Any) -> None:
        """Send off a tensor of this device."""
        ...

    def receive(self, transfer: int) -> Any:
        """The tensor, usable on this device's stream after `flush`."""
        ...

    def flush(self) -> bool:
        """Make what was received usable; tells whether the stream waits for it."""
        ...


class DevicePass:
    """A step of one device; the caller has set device and stream.

    Args:
        schedule: What every device does.
        device: Index of the device.
        torch_device: Its torch device.
        sources: Value of every source op held there.
        carrier: Brings tensors.
        random: Its random ops.
        clock: Takes the time of ops, if there is one.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        torch_device: Any,
        sources: dict[int, Any],
        carrier: Carrier,
        random: RandomOps,
        clock: Clock | None = None,
    ) -> None:
        self._schedule = schedule
        self._device = device
        self._torch_device = torch_device
        self._sources = sources
        self._carrier = carrier
        self._random = random
        self._clock = clock
        self._values: dict[Any, Any] = {}
        self._instructions = schedule.instructions[device]
        self._dead_after = last_uses(schedule, device)
        self._source_of = source_ops(schedule)
        if clock is not None:
            clock.stamp("begin")

    def run(self, index: int) -> None:
        """Carry out one instruction; they must come in order.

        Raises:
            ExecutionError: An op failed; names it.
        """
        kind, node, transfer = self._instructions[index]
        if kind != "receive":
            self._flush()
        if kind == "load":
            self._values[node] = self._sources[self._source_of[node]]
        elif kind == "send":
            self._carrier.send(transfer, self._values[node])
        elif kind == "receive":
            self._values[node] = self._carrier.receive(transfer)
        else:
            self._values[node] = self._call(node)
            self._note(node)
        for dead in self._dead_after.get(index, ()):
            del self._values[dead]

    def results(self) -> list[tuple[int, Any]]:
        """(result index, value) of the results found here; those in borrowed memory are copied."""
        self._flush()
        borrowed = self._schedule.borrowed
        return [
            (index, self._values[node].clone() if index in borrowed else self._values[node])
            for index, node in self._schedule.results[self._device]
        ]

    def _flush(self) -> None:
        if self._carrier.flush() and self._clock is not None:
            self._clock.stamp("wait")

    def _note(self, node: Any) -> None:
        if self._clock is None or node.target is operator.getitem:
            return
        op = self._schedule.graph.program.op_of[node.name]
        if not self._schedule.graph.ops[op].is_view:
            self._clock.stamp("op", op)

    def _call(self, node: Any) -> Any:
        args = torch.fx.node.map_aggregate(node.args, self._argument)
        kwargs = torch.fx.node.map_aggregate(node.kwargs, self._argument)
        try:
            if self._random.draws(node.name):
                return self._random.draw(node.name, node.target, args, kwargs)
            return node.target(*args, **kwargs)
        except Exception as error:
            raise ExecutionError(describe_op(self._schedule, self._device, node, error)) from error

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self._values[arg]
        return self._torch_device if isinstance(arg, torch.device) else arg


def source_ops(schedule: Schedule) -> dict[Any, int]:
    """Source op of every placeholder."""
    program = schedule.graph.program
    nodes = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    return {node: binding.op for node, binding in zip(nodes, program.bindings, strict=True)}


def describe_op(schedule: Schedule, device: int, node: Any, error: BaseException) -> str:
    """What failed, where, and what to do."""
    op = schedule.graph.ops[schedule.graph.program.op_of[node.name]]
    module = f"module {op.module!r}" if op.module else "the model itself"
    where = f"{module}, {op.source_line}" if op.source_line else module
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return (
        f"Op {op.name!r} ({op.target}, {op.stage}, {where}) failed on "
        f"{schedule.device_names[device]}: {reason}. Correct the cause, load the state and step "
        "again."
    )
