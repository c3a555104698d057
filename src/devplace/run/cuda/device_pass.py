"""Carry out one device's instructions, eagerly or under CUDA graph capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from devplace.errors import ExecutionError
from devplace.graph.fusion.call import one_or_all
from devplace.graph.overwrite import OUT_FORMS
from devplace.graph.program import Call
from devplace.kernels import kernel_of
from devplace.kernels.fused import kernel_of_call
from devplace.run.copies import as_traced
from devplace.run.cuda.random_ops import RandomOps
from devplace.run.cuda.timestamps import Clock
from devplace.run.cuda.transient_values import LightValues
from devplace.schedule import DeviceWrites, Schedule
from devplace.schedule.write_back import Over, Scratch, WriteBack


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

    def join(self, transfer: int) -> None:
        """Let the stream go on only when this tensor has left."""
        ...

    def finish(self) -> None:
        """Let the stream go on only when every tensor has left."""
        ...


class StateWrites:
    """How the state of one device changes hands in a step.

    Args:
        writes: What may be written back, and when.
        is_trial: Whether the step is only tried: memory is taken as in a step, sources keep their
            values, and where a new value would lie in the old one's memory the old one stands in.
        strides: New value -> its strides as the op itself lays it out. A step notes them,
            later ones compute in place where the old value lies just so.
        is_light: Whether a trial keeps large values only as descriptions.
    """

    def __init__(
        self,
        writes: DeviceWrites,
        is_trial: bool = False,
        strides: dict[int, tuple[int, ...]] | None = None,
        is_light: bool = False,
    ) -> None:
        self.is_light = is_light
        self.writes = writes
        self.is_trial = is_trial
        self.strides = {} if strides is None else strides


class DevicePass:
    """A step of one device; the caller has set device and stream.

    Args:
        schedule: What every device does.
        device: Index of the device.
        torch_device: Its torch device.
        sources: Value of every source op held there.
        carrier: Brings tensors.
        random: Its random ops.
        state: How sources are replaced.
        clock: Takes the time of ops, if there is one.
        joins: Instruction -> sends to join before it, so that their memory is free.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        torch_device: Any,
        sources: dict[int, Any],
        carrier: Carrier,
        random: RandomOps,
        state: StateWrites,
        clock: Clock | None = None,
        joins: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self._schedule = schedule
        self._device = device
        self._joins = joins or {}
        self._torch_device = torch_device
        self._sources = sources
        self._carrier = carrier
        self._random = random
        self._state = state
        self._clock = clock
        self._values: dict[int, Any] = {}
        if state.is_light:
            self._values = LightValues(schedule.graph, sources.values())
        self._instructions = schedule.instructions[device]
        self._program = schedule.captured.program
        if clock is not None:
            clock.stamp("begin")

    def run(self, index: int) -> None:
        """Carry out one instruction; they must come in order.

        Raises:
            ExecutionError: An op failed; names it.
        """
        kind, what, transfer = self._instructions[index]
        if kind != "receive":
            self._flush()
        for send in self._joins.get(index, ()):
            self._carrier.join(send)
        if kind == "load":
            self._values[what] = self._sources[self._schedule.graph.producer[what]]
        elif kind == "send":
            self._carrier.send(transfer, self._values[what])
        elif kind == "receive":
            self._values[what] = self._carrier.receive(transfer)
        else:
            self._keep(self._program.calls[what], self._make(index, what))
            self._note(what)
        for write in self._state.writes.after.get(index, ()):
            self._write(write)
        for dead in self._state.writes.drops.get(index, ()):
            del self._values[dead]
        for dead in self._state.writes.dead.get(index, ()):
            self._values.pop(dead, None)  # outputs that nobody reads were not kept

    def finish(self) -> list[tuple[int, Any]]:
        """End the step; gives (result index, value) of the results that replace nothing.

        Those in memory of a source are copied before it is overwritten.
        """
        self._flush()
        graph = self._schedule.graph
        kept = [
            (index, self._own(index, tensor))
            for index, tensor in self._schedule.results[self._device]
            if graph.results[index].replaces < 0
        ]
        late = [] if self._state.is_trial else list(self._state.writes.at_end)
        values = [self._own(write.result, write.tensor) for write in late]
        self._carrier.finish()
        for write, value in zip(late, values, strict=True):
            if self._sources[write.source] is not value:
                self._sources[write.source].copy_(value)
        self._values.clear()
        return kept

    def _own(self, result: int, tensor: int) -> Any:
        value = self._values[tensor]
        return value.clone() if result in self._schedule.borrowed else value

    def _keep(self, call: Call, made: Any) -> None:
        """The tensors that a call gave, laid out as in the trace."""
        layouts = self._program.layouts.get(call.node.name)
        if layouts is not None:
            made = as_traced(made, layouts)
        tensor = self._program.tensor_of.get(call.node.name)
        if tensor is not None:
            self._values[tensor] = made
        for place, part in call.parts:
            self._values[part] = made[place]

    def _make(self, index: int, op: int) -> Any:
        over = self._state.writes.fused.get(index)
        if over:
            return self._call_over(op, over)
        if not self._state.is_trial:
            return self._call(op, self._target_in_place(index))
        write = self._state.writes.in_place(index)
        if write is not None and self._try_in_place(op, write):
            return self._sources[write.source]
        return self._call(op)

    def _try_in_place(self, op: int, write: WriteBack | Scratch) -> bool:
        """Whether an op can write into the old value, found without a second value in memory.

        A trial must leave the old value alone, so its first rows are computed and dropped, which
        loads the kernel, and the layout of all is found without computing.
        """
        node, buffer = self._program.calls[op].node, self._sources[write.source]
        tensors = {arg: self._value_of(arg) for arg in node.all_input_nodes}
        shapes = {value.shape for value in tensors.values() if value.dim()}
        if buffer.dim() == 0 or shapes != {buffer.shape}:
            return False
        bare = {arg: _bare(value) for arg, value in tensors.items()}
        first_rows = {arg: value[:1] if value.dim() else value for arg, value in tensors.items()}
        strides = _call_with(node, bare).stride()
        self._state.strides[write.tensor] = strides
        if strides != buffer.stride():
            return False
        _call_with(node, first_rows)
        return True

    def _target_in_place(self, index: int) -> WriteBack | Scratch | None:
        """The source whose memory this instruction's op may write into, in its own layout."""
        write = self._state.writes.in_place(index)
        if write is None:
            return None
        known = self._state.strides.get(write.tensor)
        return write if known == self._sources[write.source].stride() else None

    def _write(self, write: WriteBack) -> None:
        value, buffer = self._values[write.tensor], self._sources[write.source]
        if value is buffer:
            return
        self._state.strides[write.tensor] = value.stride()
        if not self._state.is_trial:
            for transfer in write.pushes:
                self._carrier.join(transfer)
            buffer.copy_(value)
        if write.may_stand_in and value.stride() == buffer.stride():
            self._values[write.tensor] = buffer  # its own memory is free for what comes next

    def _flush(self) -> None:
        if self._carrier.flush() and self._clock is not None:
            self._clock.stamp("wait")

    def _note(self, op: int) -> None:
        is_free = self._schedule.graph.ops[op].is_view  # it starts nothing on the device
        if self._clock is not None and not is_free:
            self._clock.stamp("op", op)

    def _call(self, op: int, write: WriteBack | Scratch | None = None) -> Any:
        node = self._program.calls[op].node
        args = torch.fx.node.map_aggregate(node.args, self._argument)
        kwargs = torch.fx.node.map_aggregate(node.kwargs, self._argument)
        try:
            if self._random.draws(node.name):
                return self._random.draw(node.name, node.target, args, kwargs)
            if write is None:
                return kernel_of(node.target, self._torch_device.type)(*args, **kwargs)
            for transfer in write.pushes:
                self._carrier.join(transfer)
            return out_overload(node.target)(*args, **kwargs, out=self._sources[write.source])
        except Exception as error:
            raise ExecutionError(describe_op(self._schedule, self._device, op, error)) from error

    def _call_over(self, op: int, over: Sequence[Over]) -> Any:
        """Call a fused op that writes over some inputs; a trial leaves them as they are."""
        node = self._program.calls[op].node
        tensors = [self._value_of(arg) for arg in node.args]
        for write in over:
            for transfer in write.pushes:
                self._carrier.join(transfer)
        written = () if self._state.is_trial else [write.output for write in over]
        try:
            made = list(kernel_of_call(node.target).run(tensors, written))
        except Exception as error:
            raise ExecutionError(describe_op(self._schedule, self._device, op, error)) from error
        for write in over:
            made[write.output] = tensors[write.input]
        return one_or_all(made)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self._value_of(arg)
        return self._torch_device if isinstance(arg, torch.device) else arg

    def _value_of(self, node: Any) -> Any:
        return self._values[self._program.tensor_of[node.name]]


def _call_with(node: Any, values: Mapping[Any, Any]) -> Any:
    def value(arg: Any) -> Any:
        return values[arg] if isinstance(arg, torch.fx.Node) else arg

    args = torch.fx.node.map_aggregate(node.args, value)
    return node.target(*args, **torch.fx.node.map_aggregate(node.kwargs, value))


def _bare(value: Any) -> Any:
    """A tensor with the layout of another and no memory."""
    if value.dim() == 0 and value.device.type == "cpu":
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def out_overload(target: Any) -> Any:
    """The overload of an op of `OUT_FORMS` that writes into a given tensor.

    These ops read each element before they write it, and compute it alike in both forms; so the
    output may be an input, if both are laid out alike.
    """
    return getattr(target.overloadpacket, OUT_FORMS[str(target)])


def describe_op(schedule: Schedule, device: int, index: int, error: BaseException) -> str:
    """Which op failed, where, and what to do."""
    op = schedule.graph.ops[index]
    module = f"module {op.module!r}" if op.module else "the model itself"
    where = f"{module}, {op.source_line}" if op.source_line else module
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return (
        f"Op {op.name!r} ({op.target}, {op.stage}, {where}) failed on "
        f"{schedule.device_names[device]}: {reason}. Correct the cause, load the state and step "
        "again."
    )
