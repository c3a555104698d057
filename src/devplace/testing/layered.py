"""Graphs of any size that look like the training steps of recurrent stacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from devplace.cost import CostTable
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.machine import Device, Link, Machine
from devplace.problem import Problem

_CELL = ("mix", "product", "gate", "out")
# Ops of one cell of the grid: forward, their gradients, the weight's gradient and its sum.
OPS_PER_CELL = 2 * len(_CELL) + 2
# Of an accelerator with NVLink; the shape of the results does not depend on them.
_BYTES_PER_S, _LATENCY_NS = 150 * 10**9, 5_000


def layered_problem(num_ops: int, num_devices: int, seed: int = 0) -> Problem:
    """A training step of a grid of layers and time steps, on equal devices linked all to all.

    A cell reads the cell below it and the one before it in time, and its layer's parameter; the
    gradients go the other way, weight gradients are summed over time. Layers and time steps are as
    many as each other. Equal ops of a layer take equal time (5 to 200 us) and give equal tensors
    (0.1 to 4 MB).

    Args:
        num_ops: About how many ops; at least 10.
        num_devices: Devices.
        seed: Of the times and sizes.
    """
    graph, time_ns = _Grid(num_ops, np.random.default_rng(seed)).build()
    names = [f"gpu:{d}" for d in range(num_devices)]
    devices = tuple(
        Device(
            name=name, kind="gpu", memory_bytes=10**15, flops_per_s={"float32": 1}, bytes_per_s=1
        )
        for name in names
    )
    links = tuple(
        Link(
            src=a,
            dst=b,
            bytes_per_s=_BYTES_PER_S,
            latency_ns=_LATENCY_NS,
            channels=(f"{a}-out", f"{b}-in"),
        )
        for a in names
        for b in names
        if a != b
    )
    machine = Machine(f"layered-{num_devices}", devices, links)
    costs = np.repeat(np.array(time_ns, np.int64)[:, None], num_devices, axis=1)
    return Problem(graph, machine, CostTable(costs, "layered"))


@dataclass
class _Grid:
    """A graph that grows op by op."""

    num_ops: int
    rng: np.random.Generator
    ops: list[Op] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    time_ns: list[int] = field(default_factory=list)

    def build(self) -> tuple[OpGraph, list[int]]:
        cells = max(1, self.num_ops // OPS_PER_CELL)
        layers = max(1, math.isqrt(cells))
        steps = max(1, cells // layers)
        weight = [self._add(f"w{k}", (), 10**6, 0, f"layers.{k}", 0, "source") for k in range(layers)]
        start = self._add("x", (), 10**5, 0, "", 0, "source")
        sizes = [[int(s) for s in self.rng.integers(10**5, 4 * 10**6, 4)] for _ in range(layers)]
        times = [[int(t) for t in self.rng.integers(5, 200, 6) * 1000] for _ in range(layers)]
        out: dict[tuple[int, int], int] = {}
        for t in range(steps):
            for k in range(layers):
                reads = (out.get((k - 1, t), start), out.get((k, t - 1), start), weight[k])
                out[k, t] = self._chain("f", reads, sizes[k], times[k], k, t, "forward")
        back: dict[tuple[int, int], int] = {}
        total: dict[int, int] = {}
        for t in reversed(range(steps)):
            for k in reversed(range(layers)):
                end = out[k, t]
                reads = (back.get((k + 1, t), end), back.get((k, t + 1), end), weight[k], end)
                back[k, t] = self._chain("b", reads, sizes[k], times[k], k, t, "backward")
                made = self._op(f"g{k}.{t}", (back[k, t], end), 10**6, times[k][4], k, t, "backward")
                if k in total:
                    made = self._op(f"s{k}.{t}", (total[k], made), 10**6, 5000, k, t, "backward")
                total[k] = made
        results = []
        for k in range(layers):
            new = self._op(f"u{k}", (weight[k], total[k]), 10**6, times[k][5], k, 0, "update")
            results.append(StepResult(f"w{k}", new, "parameter", k))
        results.append(StepResult("loss", out[layers - 1, steps - 1], "loss"))
        return OpGraph("layered", tuple(self.ops), tuple(self.tensors), tuple(results)), self.time_ns

    def _chain(
        self,
        name: str,
        reads: tuple[int, ...],
        sizes: list[int],
        times: list[int],
        layer: int,
        step: int,
        stage: str,
    ) -> int:
        for part, size, time_ns in zip(_CELL, sizes, times, strict=False):
            made = self._op(f"{name}.{part}{layer}.{step}", reads, size, time_ns, layer, step, stage)
            reads = (made,)
        return made

    def _op(
        self,
        name: str,
        reads: tuple[int, ...],
        num_bytes: int,
        time_ns: int,
        layer: int,
        step: int,
        stage: str,
    ) -> int:
        unique = tuple(dict.fromkeys(reads))
        return self._add(name, unique, num_bytes, time_ns, f"layers.{layer}", step, stage)

    def _add(
        self,
        name: str,
        reads: tuple[int, ...],
        num_bytes: int,
        time_ns: int,
        module: str,
        call: int,
        stage: str,
    ) -> int:
        is_source = stage == "source"
        role = ("parameter" if module else "input") if is_source else ""
        made = len(self.tensors)
        self.tensors.append(Tensor(name, (num_bytes,), "uint8", num_bytes))
        self.ops.append(
            Op(
                name,
                "source" if is_source else name.partition(".")[0],
                reads,
                (made,),
                stage=stage,  # type: ignore[arg-type]
                role=role,  # type: ignore[arg-type]
                module=module,
                call=call,
            )
        )
        self.time_ns.append(time_ns)
        return made
