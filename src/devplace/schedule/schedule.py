"""What every device does in a step: the records that the simulator and the executors share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from devplace.graph import Captured, OpGraph, as_captured

InstructionKind = Literal["load", "call", "send", "receive"]


class Instruction(NamedTuple):
    """One thing a device does.

    Attributes:
        kind: `load` a source, `call` an op, `send` to or `receive` from another device.
        what: The op that is called; or the tensor that is loaded, sent or received.
        transfer: Index into `Schedule.transfers` for `send` and `receive`, else -1.
    """

    kind: InstructionKind
    what: int
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
        graph: The step.
        device_names: Names of the devices.
        device_of_op: Device index per op of the graph.
        instructions: Per device, in the order it runs them.
        transfers: All copies between devices in one step.
        holders: Source op -> devices that hold a copy of it before the step.
        results: Per device, the results found there after the step: (result index, tensor).
        borrowed: Indices of results that share memory with a source and must be copied.
    """

    graph: OpGraph
    device_names: tuple[str, ...]
    device_of_op: tuple[int, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    transfers: tuple[PlannedTransfer, ...]
    holders: Mapping[int, tuple[int, ...]]
    results: tuple[tuple[tuple[int, int], ...], ...]
    borrowed: frozenset[int]

    @property
    def captured(self) -> Captured:
        """The graph with what runs its ops.

        Raises:
            InputError: It is data alone.
        """
        return as_captured(self.graph, "To run it")

    def made_by(self, instruction: Instruction) -> tuple[int, ...]:
        """Tensors that are there after an instruction: what it loads, receives or computes."""
        if instruction.kind == "call":
            return self.graph.ops[instruction.what].outputs
        return () if instruction.kind == "send" else (instruction.what,)

    def read_by(self, instruction: Instruction) -> tuple[int, ...]:
        """Tensors that an instruction reads on its device."""
        if instruction.kind == "call":
            return self.graph.ops[instruction.what].inputs
        return (instruction.what,) if instruction.kind == "send" else ()


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


def last_uses(schedule: Schedule, device: int) -> dict[int, list[int]]:
    """Instruction -> tensors that nothing on the device needs after it, results apart."""
    last: dict[int, int] = {}
    for index, instruction in enumerate(schedule.instructions[device]):
        for tensor in (*schedule.made_by(instruction), *schedule.read_by(instruction)):
            last[tensor] = index
    return by_last_use(last, schedule.results[device])


def by_last_use(
    last: Mapping[int, int], results: Sequence[tuple[int, int]]
) -> dict[int, list[int]]:
    """Last use of each tensor -> those tensors, without results."""
    kept = {tensor for _, tensor in results}
    dead: dict[int, list[int]] = {}
    for tensor, index in last.items():
        if tensor not in kept:
            dead.setdefault(index, []).append(tensor)
    return dead
