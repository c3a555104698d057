"""Published instances as the problems that devplace's solvers take: whole numbers, rounded once."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from math import ceil, floor

import numpy as np

from devplace.cost import CostTable
from devplace.errors import InputError
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.instances.records import (
    DataflowInstance,
    LoadInstance,
    PipelineInstance,
    VariantInstance,
)
from devplace.instances.text import check_acyclic
from devplace.load import LoadProblem
from devplace.load.latency import BlockProblem
from devplace.load.replicated import ReplicatedProblem
from devplace.load.tensor_stages import TensorStageProblem, Variant
from devplace.machine import Device, Link, Machine
from devplace.problem import Problem
from devplace.units import NS_PER_S

PS_PER_MS = 10**9
_MOST_BYTES = 2**59
_MOST_SCALE = 10**6


def load_problem(instance: LoadInstance) -> LoadProblem:
    """Times in whole picoseconds, sizes rounded up and the limit rounded down to whole bytes."""
    colors = {color: k for k, color in enumerate(dict.fromkeys(_colors(instance)))}
    nodes, edges = instance.nodes, np.array(instance.edges, np.int32).reshape(-1, 2)
    output = _picoseconds([node.output_ms for node in nodes])
    return LoadProblem(
        accelerator_ps=_picoseconds([node.accelerator_ms for node in nodes]),
        cpu_ps=_picoseconds([node.cpu_ms for node in nodes]),
        can_accelerate=np.array([node.can_accelerate for node in nodes], bool),
        size_bytes=np.array([_bytes(node.size_bytes) for node in nodes], np.int64),
        edge_src=edges[:, 0].copy(),
        edge_dst=edges[:, 1].copy(),
        edge_ps=output[edges[:, 0]],
        color=np.array(
            [-1 if node.color is None else colors[node.color] for node in nodes], np.int32
        ),
        is_backward=np.array([node.is_backward for node in nodes], bool),
        num_accelerators=instance.num_accelerators,
        num_cpus=instance.num_cpus,
        memory_bytes=min(floor(instance.memory_bytes), _MOST_BYTES),
    )


def block_problem(instance: LoadInstance) -> BlockProblem:
    """The same for the latency of one sample."""
    problem = load_problem(instance)
    return BlockProblem(**{field.name: getattr(problem, field.name) for field in fields(problem)})


def replicated_problem(instance: PipelineInstance) -> ReplicatedProblem:
    """Times in whole picoseconds; sizes in whole bytes, what passes between stages scaled."""
    nodes, scale = instance.nodes, Fraction(instance.edge_cost_scale)
    edges = np.array(instance.edges, np.int32).reshape(-1, 2)
    passed = [round(Fraction(layer.activation_bytes) * (scale or 1)) for layer in nodes]
    return ReplicatedProblem(
        work_ps=_picoseconds([layer.compute_ms for layer in nodes]),
        activation_bytes=np.array(passed, np.int64),
        parameter_bytes=np.array([round(layer.parameter_bytes) for layer in nodes], np.int64),
        edge_src=edges[:, 0].copy(),
        edge_dst=edges[:, 1].copy(),
        num_devices=instance.num_devices,
        bandwidth=instance.bandwidth,
        count_transfers=scale > 0,
    )


def tensor_stage_problem(instance: VariantInstance) -> TensorStageProblem:
    """The same numbers under the names of the solver."""
    variants = tuple(
        {
            degree: tuple(
                Variant(
                    given.id,
                    given.seconds,
                    given.parameter_bytes,
                    given.memory_a,
                    given.memory_b,
                    dict(given.sync_in),
                    dict(given.sync_out),
                )
                for given in choices
            )
            for degree, choices in node.variants
        }
        for node in instance.nodes
    )
    src, dst, size = zip(*instance.edges, strict=True) if instance.edges else ((), (), ())
    return TensorStageProblem(
        variants,
        src,
        dst,
        size,
        instance.num_devices,
        instance.memory_bytes,
        instance.bandwidth,
        instance.batch,
    )


def _colors(instance: LoadInstance) -> list[int]:
    return [node.color for node in instance.nodes if node.color is not None]


def _picoseconds(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found = [round(Fraction(value) * PS_PER_MS) for value in values]
    if sum(found) >= 2**60:
        total = sum(values)
        raise InputError(
            f"Times must add up to less than 10^9 ms, these add up to {total:.3g}. "
            f"Scale the file's times down."
        )
    return np.array(found, np.int64)


def _bytes(size: float) -> int:
    """Whole bytes, more than any memory for what is larger than that."""
    return min(ceil(size), _MOST_BYTES // 1024)


def dataflow_problem(instance: DataflowInstance) -> tuple[Problem, Fraction]:
    """Equal devices with links that nothing waits for, and memory for everything.

    Returns:
        The problem, in whole nanoseconds, and how many of the instance's unit one stands for.
    """
    unit = _unit([*instance.compute, *instance.transfer])
    order = check_acyclic(
        instance.about.path, [str(op) for op in range(len(instance.compute))], instance.edges
    )
    place = {op: k for k, op in enumerate(order)}
    inputs: list[list[int]] = [[] for _ in order]
    for producer, consumer in instance.edges:
        inputs[place[consumer]].append(place[producer])
    size = [round(Fraction(instance.transfer[op]) / unit) for op in order]
    ops = tuple(
        Op(
            name=str(op),
            target=instance.kinds[op] or "op",
            inputs=tuple(sorted(inputs[k])),
            outputs=(k,),
        )
        for k, op in enumerate(order)
    )
    tensors = tuple(Tensor(str(op), (size[k],), "uint8", size[k]) for k, op in enumerate(order))
    made = {k for row in inputs for k in row}
    results = tuple(StepResult(ops[k].name, k, "output") for k in range(len(ops)) if k not in made)
    graph = OpGraph(instance.about.name, ops, tensors, results)
    compute = [round(Fraction(instance.compute[op]) / unit) for op in order]
    costs = np.tile(np.array(compute, np.int64)[:, None], (1, instance.num_devices))
    machine = _equal_devices(instance.num_devices)
    return Problem(graph, machine, CostTable(costs, instance.about.name)), unit


def _unit(values: list[float]) -> Fraction:
    """1 if all numbers are whole, else the smallest power of ten that makes them so, or nearly."""
    scale = 1
    while scale < _MOST_SCALE and any(
        abs(Fraction(value) * scale - round(Fraction(value) * scale)) > Fraction(1, 10**6)
        for value in values
    ):
        scale *= 10
    unit = Fraction(1, scale)
    while sum(map(Fraction, values)) * 64 / unit >= 2**61:  # everything sent everywhere must fit
        unit *= 10
    return unit


def _equal_devices(count: int) -> Machine:
    devices = tuple(
        Device(
            name=f"gpu:{d}",
            kind="gpu",
            memory_bytes=2**62,
            flops_per_s={"float32": NS_PER_S},
            bytes_per_s=NS_PER_S,
        )
        for d in range(count)
    )
    links = tuple(
        Link(src=a.name, dst=b.name, bytes_per_s=NS_PER_S, parallel=True)
        for a in devices
        for b in devices
        if a is not b
    )
    return Machine(f"{count} equal devices", devices, links)
