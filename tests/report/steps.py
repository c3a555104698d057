"""Training steps small enough to work out by hand."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from devplace.cost import CostTable
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.machine import Device, Link, Machine
from devplace.placers import Result, place
from devplace.problem import Placement, Problem

OP_NS = 1_000_000
WEIGHT, ACTIVATION = 1000, 100


def chain_graph(num_layers: int) -> OpGraph:
    """A chain of layers: forward, loss, and per layer activation gradient, weight gradient, update.

    Ops: `x`, then all `layer{k}.weight`, `f{k}`, `loss`, and from the last layer on `d{k}` (not
    for layer 0), `g{k}`, `u{k}`.
    """
    ops: list[Op] = []
    tensors: list[Tensor] = []

    def add(name: str, size: int, reads: list[str], **fields: Any) -> None:
        inputs = tuple(next(t for t, s in enumerate(tensors) if s.name == r) for r in reads)
        tensors.append(Tensor(name, (size,), "uint8", size))
        fields.setdefault("target", f"aten.{name.rstrip('0123456789')}.default")
        ops.append(Op(name=name, inputs=inputs, outputs=(len(tensors) - 1,), **fields))

    add("x", ACTIVATION, [], target="source", stage="source", role="input")
    for k in range(num_layers):
        name, module = f"layer{k}.weight", f"layer{k}"
        add(name, WEIGHT, [], target="source", stage="source", role="parameter", module=module)
    for k in range(num_layers):
        reads = ["x" if k == 0 else f"f{k - 1}", f"layer{k}.weight"]
        add(f"f{k}", ACTIVATION, reads, module=f"layer{k}", source_line="model.py:1")
    add("loss", 4, [f"f{num_layers - 1}"])
    above = "loss"
    for k in reversed(range(num_layers)):
        module, below = f"layer{k}", "x" if k == 0 else f"f{k - 1}"
        add(f"g{k}", WEIGHT, [above, below], module=module, stage="backward")
        if k:
            reads = [above, f"layer{k}.weight"]
            add(f"d{k}", ACTIVATION, reads, module=module, stage="backward")
            above = f"d{k}"
    for k in range(num_layers):
        add(f"u{k}", WEIGHT, [f"layer{k}.weight", f"g{k}"], module=f"layer{k}", stage="update")
    index = {op.name: i for i, op in enumerate(ops)}
    results = [StepResult("loss", index["loss"], "loss")]
    for k in range(num_layers):
        weight = f"layer{k}.weight"
        results.append(StepResult(weight, index[f"u{k}"], "parameter", index[weight]))
    return OpGraph("chain", tuple(ops), tuple(tensors), tuple(results))


def wide_graph(num_branches: int) -> OpGraph:
    """Branches of one op each that read one input; nothing joins them."""
    tensors = [Tensor("x", (ACTIVATION,), "uint8", ACTIVATION)]
    ops = [Op("x", "source", (), (0,), stage="source", role="input")]
    for k in range(num_branches):
        tensors.append(Tensor(f"b{k}", (ACTIVATION,), "uint8", ACTIVATION))
        ops.append(Op(f"b{k}", "aten.mm.default", (0,), (k + 1,), module=f"branch{k}"))
    results = tuple(StepResult(f"out{k}", k + 1, "output") for k in range(num_branches))
    return OpGraph("wide", tuple(ops), tuple(tensors), results)


def machine(
    num_gpus: int = 2,
    memory: int = 10**9,
    with_cpu: bool = False,
    unsupported: tuple[str, ...] = (),
) -> Machine:
    """GPUs (and a CPU), all linked at 1 GB/s with 1 us of latency."""
    rates: dict[str, Any] = {"flops_per_s": {"float32": 1}, "bytes_per_s": 1}
    devices = [Device(name="cpu:0", kind="cpu", memory_bytes=10**9, **rates)] if with_cpu else []
    devices += [
        Device(
            name=f"cuda:{d}", kind="gpu", memory_bytes=memory, unsupported_ops=unsupported, **rates
        )
        for d in range(num_gpus)
    ]
    links = tuple(
        Link(src=a.name, dst=b.name, bytes_per_s=10**9, latency_ns=1000)
        for a in devices
        for b in devices
        if a is not b
    )
    return Machine("tiny", tuple(devices), links)


def make_problem(graph: OpGraph, where: Machine, **demands: Any) -> Problem:
    """Every op takes 1 ms on a GPU and 10 ms on a CPU."""
    slow = np.array([10 if device.kind == "cpu" else 1 for device in where.devices])
    work = np.array([0 if op.is_source or op.is_view else OP_NS for op in graph.ops])
    return Problem(graph, where, CostTable(work[:, None] * slow[None, :], "hand"), **demands)


class Fixed:
    """A placer that puts named ops (by prefix of name or module) on given devices."""

    name = "fixed"

    def __init__(self, problem: Problem, devices: dict[str, str], default: str) -> None:
        index = problem.machine.device_index
        self._devices = np.full(len(problem.graph.ops), index[default], np.int32)
        for i, op in enumerate(problem.graph.ops):
            for prefix, device in devices.items():
                if op.name.startswith(prefix) or op.module.startswith(prefix):
                    self._devices[i] = index[device]

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(self, problem: Problem, evaluate: Any, rng: Any) -> Placement:
        """The given placement."""
        placement = Placement(self._devices)
        evaluate(placement)
        return placement


def placed(problem: Problem, devices: dict[str, str] | None = None, default: str = "") -> Result:
    """Result of a given placement, feasible or not."""
    default = default or problem.machine.device_names[-1]
    placer = Fixed(problem, devices or {}, default)
    return place(problem, placer, "1ev", allow_infeasible=True)


def rendered(table: Table, width: int) -> str:
    """The table as it looks when piped, at a given width."""
    out = io.StringIO()
    Console(width=width, file=out).print(table)
    return out.getvalue()
