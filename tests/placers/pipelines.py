"""Pipelines of micro-batches written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from devplace.machine import Machine
from devplace.problem import Placement, Problem
from devplace.testing import hand_placement, hand_problem


def pipeline(
    layers: int,
    parts: int,
    machine: Machine,
    *,
    kept: int = 100,
    weight: int = 1000,
    **demands: Any,
) -> Problem:
    """Layers with one parameter each; `f<layer>_<part>` takes 1000 ns and keeps some bytes until
    `b<layer>_<part>` (2000 ns) has ended; `u<layer>` takes none."""
    lines = [f"w{k} = parameter bytes={weight} module=l.{k}" for k in range(layers)]
    lines += [f"x_{m} = input bytes=1" for m in range(parts)]
    for m in range(parts):
        for k in range(layers):
            read = f"f{k - 1}_{m}" if k else f"x_{m}"
            lines.append(
                f"f{k}_{m} = f({read}, w{k}) bytes={kept} ns=1000 module=l.{k} stage=forward "
                f"micro_batch={m}"
            )
        for k in reversed(range(layers)):
            later = f", b{k + 1}_{m}" if k < layers - 1 else ""
            lines.append(
                f"b{k}_{m} = b(f{k}_{m}, w{k}{later}) bytes=1 ns=2000 module=l.{k} stage=backward "
                f"micro_batch={m}"
            )
    for k in range(layers):
        sums = ", ".join(f"b{k}_{m}" for m in range(parts))
        lines.append(
            f"u{k} = sgd_(w{k}, {sums}) bytes=0 ns=0 replaces=w{k} module=l.{k} stage=update"
        )
    problem = hand_problem("\n".join(lines), machine, **demands)
    graph = replace(problem.graph, meta={**problem.graph.meta, "micro_batches": parts})
    return replace(problem, graph=graph)


def layer_by_layer(problem: Problem) -> Placement:
    """Layer k on the k-th device."""
    names = problem.machine.device_names
    layered = [name for name in problem.graph.op_index if name[0] in "wfbu"]
    return hand_placement(problem, {n: names[int(n.split("_")[0][1:])] for n in layered})
