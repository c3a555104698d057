"""Graphs of any size that look like the training steps of recurrent stacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from devplace.cost import CostTable
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.graph.graph import Role, Stage
from devplace.machine import Device, Link, Machine
from devplace.problem import Problem

# Of the grid: four forward, their gradients, the weight's gradient and its sum.
OPS_PER_CELL = 10
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
        """The graph, and the time of each op."""
        cells = max(1, self.num_ops // OPS_PER_CELL)
        self.layers = max(1, math.isqrt(cells))
        self.steps = max(1, cells // self.layers)
        rows = range(self.layers)
        self.weight = [
            self._add(f"w{k}", (), 10**6, 0, _At(k, 0, "source"), "parameter") for k in rows
        ]
        self.sizes = [self.rng.integers(10**5, 4 * 10**6, 4).tolist() for _ in rows]
        self.times = [(self.rng.integers(5, 200, 6) * 1000).tolist() for _ in rows]
        out = self._forward()
        total = self._backward(out)
        results = []
        for k in rows:
            reads = (self.weight[k], total[k])
            new = self._add(f"u{k}", reads, 10**6, self.times[k][5], _At(k, 0, "update"))
            results.append(StepResult(f"w{k}", new, "parameter", k))
        results.append(StepResult("loss", out[self.layers - 1, self.steps - 1], "loss"))
        graph = OpGraph("layered", tuple(self.ops), tuple(self.tensors), tuple(results))
        return graph, self.time_ns

    def _forward(self) -> dict[tuple[int, int], int]:
        start = self._add("x", (), 10**5, 0, _At(0, 0, "source"), "input")
        out: dict[tuple[int, int], int] = {}
        for t in range(self.steps):
            for k in range(self.layers):
                reads = (out.get((k - 1, t), start), out.get((k, t - 1), start), self.weight[k])
                out[k, t] = self._cell("f", reads, _At(k, t, "forward"))
        return out

    def _backward(self, out: dict[tuple[int, int], int]) -> dict[int, int]:
        """The sum of each layer's weight gradients."""
        back: dict[tuple[int, int], int] = {}
        total: dict[int, int] = {}
        for t in reversed(range(self.steps)):
            for k in reversed(range(self.layers)):
                end, at = out[k, t], _At(k, t, "backward")
                above, later = back.get((k + 1, t), end), back.get((k, t + 1), end)
                back[k, t] = self._cell("b", (above, later, self.weight[k], end), at)
                own = self._add(f"g{k}.{t}", (back[k, t], end), 10**6, self.times[k][4], at)
                if k in total:
                    own = self._add(f"s{k}.{t}", (total[k], own), 10**6, 5000, at)
                total[k] = own
        return total

    def _cell(self, name: str, reads: tuple[int, ...], at: _At) -> int:
        """Four ops, one after the other."""
        for part in range(4):
            size, time_ns = self.sizes[at.layer][part], self.times[at.layer][part]
            made = self._add(f"{name}{part}.{at.layer}.{at.step}", reads, size, time_ns, at)
            reads = (made,)
        return made

    def _add(
        self,
        name: str,
        reads: tuple[int, ...],
        num_bytes: int,
        time_ns: int,
        at: _At,
        role: Role = "",
    ) -> int:
        """One op; its output."""
        made = len(self.tensors)
        self.tensors.append(Tensor(name, (num_bytes,), "uint8", num_bytes))
        self.ops.append(
            Op(
                name,
                "source" if role else name.partition(".")[0],
                tuple(dict.fromkeys(reads)),
                (made,),
                stage=at.stage,
                role=role,
                module="" if role == "input" else f"layers.{at.layer}",
                call=at.step,
            )
        )
        self.time_ns.append(time_ns)
        return made


class _At(NamedTuple):
    """Where in the grid, and in the step, an op is."""

    layer: int
    step: int
    stage: Stage
