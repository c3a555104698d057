"""One straight-line Python function per device, made from its instruction list.

Per op, beside the op itself, `fx.Interpreter` costs 10-15 us, a list interpreter 0.4-0.8 us and
generated code with bound ops 0.05 us (steps of RNNLM, NMT and BERT, torch 2.13, one x86 core).
What is left per op is printed by benchmarks/executor.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from devplace.kernels import kernel_of
from devplace.run.copies import as_traced
from devplace.run.seeds import call_with_default_generator, op_seed, takes_generator
from devplace.schedule import Instruction, Schedule, last_uses

# A failed step must also end on devices that receive nothing; looking costs about 20 ns.
_CALLS_BETWEEN_STOP_CHECKS = 32
FILE_NAME = "<devplace step>"


class StoppedError(Exception):
    """Another device failed; this one ends its step."""


@dataclass(frozen=True)
class DeviceCode:
    """The generated function of one device.

    Attributes:
        function: `function(src, post, receive, stop, seed, step, gen, rec) -> results`.
        sources: Source ops in the order of the list `src`.
        instruction_at: Line number -> index of the instruction made there.
        source: The generated text.
    """

    function: Callable[..., list[Any]]
    sources: tuple[int, ...]
    instruction_at: dict[int, int]
    source: str


def generate(schedule: Schedule, device: int, is_timed: bool = False) -> DeviceCode:
    """Generate the function of one device.

    Values are dropped right after their last use on the device.

    Args:
        schedule: What every device does.
        device: Index of the device.
        is_timed: Whether ops record start and finish through `rec((op, start_ns, finish_ns))`.
    """
    return _Generator(schedule, device, is_timed).generate()


class _Generator:
    def __init__(self, schedule: Schedule, device: int, is_timed: bool) -> None:
        self._schedule = schedule
        self._program = schedule.captured.program
        self._device = device
        self._is_timed = is_timed
        self._position = self._program.random_ops
        self._names: dict[int, str] = {}
        self._globals: dict[str, Any] = {
            "Stopped": StoppedError,
            "op_seed": op_seed,
            "draw": call_with_default_generator,
            "now": time.perf_counter_ns,
            "as_traced": as_traced,
        }
        self._global_of: dict[int, str] = {}

    def generate(self) -> DeviceCode:
        instructions = self._schedule.instructions[self._device]
        held = self._schedule.holders
        sources = tuple(op for op, devices in held.items() if self._device in devices)
        self._slot = {op: slot for slot, op in enumerate(sources)}
        dead_after = last_uses(self._schedule, self._device)
        lines = ["def run(src, post, receive, stop, seed, step, gen, rec):"]
        instruction_at = {}
        for index, instruction in enumerate(instructions):
            if index % _CALLS_BETWEEN_STOP_CHECKS == 0:
                lines.append(" if stop: raise Stopped")
            text = self._statement(instruction)
            dead = [self._names[t] for t in dead_after.get(index, ()) if t in self._names]
            if dead:
                text += "; " + " = ".join(dead) + " = None"
            lines.append(" " + text)
            instruction_at[len(lines)] = index
        results = [self._name(tensor) for _, tensor in self._schedule.results[self._device]]
        lines.append(f" return [{', '.join(results)}]")
        source = "\n".join(lines) + "\n"
        exec(compile(source, FILE_NAME, "exec"), self._globals)
        return DeviceCode(self._globals["run"], sources, instruction_at, source)

    def _name(self, tensor: int) -> str:
        return self._names.setdefault(tensor, f"v{len(self._names)}")

    def _statement(self, instruction: Instruction) -> str:
        kind, what, transfer = instruction
        if kind == "load":
            slot = self._slot[self._schedule.graph.producer[what]]
            return f"{self._name(what)} = src[{slot}]; src[{slot}] = None"
        if kind == "send":
            return f"post({transfer}, {self._name(what)})"
        if kind == "receive":
            return f"{self._name(what)} = receive({transfer})"
        node, parts = self._program.calls[what]
        made = self._call(node)
        layouts = self._program.layouts.get(node.name)
        if layouts is not None:
            made = f"as_traced({made}, {layouts!r})"
        tensor = self._program.tensor_of.get(node.name)
        call = f"{'several' if tensor is None else self._name(tensor)} = {made}"
        if self._is_timed and not self._schedule.graph.ops[what].is_view:
            call = f"t = now(); {call}; rec(({what}, t, now()))"
        if tensor is None:
            taken = [f"{self._name(part)} = several[{place}]; " for place, part in parts]
            call = f"{call}; {''.join(taken)}several = None"
        return call

    def _call(self, node: Any) -> str:
        kernel = kernel_of(node.target, "cpu")
        function = self._bind(getattr(kernel, "_op", kernel))
        args = [self._text(arg) for arg in node.args]
        kwargs = {key: self._text(value) for key, value in node.kwargs.items()}
        position = self._position.get(node.name)
        if position is not None:
            seed = f"op_seed(seed, step, {position})"
            if not takes_generator(node.target):
                pairs = ", ".join(f"{key!r}: {value}" for key, value in kwargs.items())
                return f"draw({function}, {seed}, ({''.join(a + ', ' for a in args)}), {{{pairs}}})"
            kwargs["generator"] = f"gen.manual_seed({seed})"
        args += [f"{key}={value}" for key, value in kwargs.items()]
        return f"{function}({', '.join(args)})"

    def _text(self, arg: Any) -> str:
        if isinstance(arg, torch.fx.Node):
            return self._name(self._program.tensor_of[arg.name])
        if isinstance(arg, torch.device):
            return self._bind(run_device(arg))
        if type(arg) is list or isinstance(arg, torch.fx.immutable_collections.immutable_list):
            return f"[{', '.join(self._text(item) for item in arg)}]"
        if type(arg) is tuple:
            return f"({''.join(self._text(item) + ', ' for item in arg)})"
        if isinstance(arg, slice):
            return f"slice({self._text(arg.start)}, {self._text(arg.stop)}, {self._text(arg.step)})"
        if arg is None or arg is ... or type(arg) in (bool, int, str):
            return repr(arg) if arg is not ... else "..."
        if type(arg) is float and math.isfinite(arg):
            return repr(arg)
        return self._bind(arg)

    def _bind(self, value: Any) -> str:
        name = self._global_of.setdefault(id(value), f"g{len(self._global_of)}")
        self._globals[name] = value
        return name


def failed_instruction(error: BaseException, code: DeviceCode) -> int | None:
    """Index of the instruction of a device at which an error came up, None outside its code."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame.f_code
        if frame.co_filename == FILE_NAME and frame is code.function.__code__:
            return code.instruction_at.get(trace.tb_lineno)
        trace = trace.tb_next
    return None


def run_device(_captured: Any) -> Any:
    """The torch device that factory ops run on, in place of the one they were captured with."""
    return torch.device("cpu")
