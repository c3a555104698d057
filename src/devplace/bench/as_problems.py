"""Published instances as problems for devplace's solvers, rounded once to integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import ceil, frexp

import numpy as np

from devplace.bench.whole import whole_sizes, whole_times
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
from devplace.machine import Device, Link, Machine
from devplace.pipelining import LoadProblem
from devplace.pipelining.block_latency import BlockProblem
from devplace.pipelining.items import make_items
from devplace.pipelining.load_bounds import why_infeasible
from devplace.pipelining.replicated import PS_PER_S, ReplicatedProblem
from devplace.pipelining.tensor_stages import StageVariant, TensorStageProblem
from devplace.problem import Problem
from devplace.units import NS_PER_S

PS_PER_MS = 10**9
_MAX_MS = 10**9


@dataclass(frozen=True)
class Rounded:
    """An instance in whole numbers.

    Attributes:
        problem: With no more devices of a kind than there are nodes: others stay empty.
        per_ms: Units of its times in 1 ms; picoseconds unless they are too coarse.
        is_exact: Whether what holds for the problem holds for the instance: what fits the memory,
            and values to 1e-8.
        never_fits: Whether sums show that nothing fits, even with sizes rounded down.
        in_bytes: Whether its sizes are those of the file, in bytes.
    """

    problem: LoadProblem
    per_ms: int
    is_exact: bool
    never_fits: bool
    in_bytes: bool

    def device(self, instance: LoadInstance, device: Sequence[int]) -> tuple[int, ...]:
        """Devices of the instance for those of the problem."""
        k, shift = self.problem.num_accelerators, instance.num_accelerators
        return tuple(int(d) if d < k else shift + int(d) - k for d in device)


def round_load(instance: LoadInstance) -> Rounded:
    """Times in whole picoseconds or finer, sizes in whole bytes or finer.

    Raises:
        InputError: Times do not fit 64 bits.
    """
    nodes = instance.nodes
    columns = [
        [node.accelerator_ms for node in nodes],
        [node.cpu_ms for node in nodes],
        [node.output_ms for node in nodes],
    ]
    for column in columns:
        _check_times(column)
    (accelerator, cpu, output), per_ms, are_times_exact = whole_times(columns, PS_PER_MS)
    sizes, limit, exponent, are_sizes_exact = whole_sizes(
        [node.size_bytes for node in nodes], instance.memory_bytes
    )
    colors = {color: k for k, color in enumerate(dict.fromkeys(_colors(instance)))}
    edges = np.array(instance.edges, np.int32).reshape(-1, 2)
    problem = LoadProblem(
        accelerator_ps=np.array(accelerator, np.int64),
        cpu_ps=np.array(cpu, np.int64),
        can_accelerate=np.array([node.can_accelerate for node in nodes], bool),
        size_bytes=np.array(sizes, np.int64),
        edge_src=edges[:, 0].copy(),
        edge_dst=edges[:, 1].copy(),
        edge_ps=np.array(output, np.int64)[edges[:, 0]],
        color=np.array(
            [-1 if node.color is None else colors[node.color] for node in nodes], np.int32
        ),
        is_backward=np.array([node.is_backward for node in nodes], bool),
        num_accelerators=min(instance.num_accelerators, len(nodes)),
        num_cpus=min(instance.num_cpus, len(nodes)),
        memory_bytes=limit,
    )
    is_plain = sizes == [node.size_bytes for node in nodes]
    least = np.maximum(problem.size_bytes - 1, 0)
    relaxed = replace(problem, size_bytes=least, memory_bytes=limit + 1)
    return Rounded(
        problem,
        per_ms,
        are_times_exact and are_sizes_exact,
        bool(why_infeasible(make_items(problem if are_sizes_exact else relaxed))),
        exponent == 0 and is_plain,
    )


def load_problem(instance: LoadInstance) -> LoadProblem:
    """The problem alone."""
    return round_load(instance).problem


def block_problem(problem: LoadProblem) -> BlockProblem:
    """The same numbers for the latency of one sample."""
    return BlockProblem(**{field.name: getattr(problem, field.name) for field in fields(problem)})


def replicated_problem(instance: PipelineInstance) -> tuple[ReplicatedProblem, Fraction]:
    """Times in whole units, so fine that rounding loses nothing that counts; sizes in units of a
    power of two of bytes. No value exceeds the time on one device, which so sets the unit.

    Returns:
        The problem, and how many seconds one of its units is.
    """
    nodes, scale = instance.nodes, Fraction(instance.edge_cost_scale)
    edges = np.array(instance.edges, np.int32).reshape(-1, 2)
    parameters = [Fraction(layer.parameter_bytes) for layer in nodes]
    held = [
        Fraction(layer.activation_bytes) + p for layer, p in zip(nodes, parameters, strict=True)
    ]
    passed = [Fraction(layer.activation_bytes) * (scale or 1) for layer in nodes]
    most = max(sum(parameters), sum(passed), Fraction(1))
    shift = Fraction(2) ** (56 - ceil(most).bit_length())  # bytes to units
    rate = Fraction(instance.bandwidth)
    work = [Fraction(layer.compute_ms) / 1000 for layer in nodes]
    longest = sum(work, Fraction(0))
    unit = Fraction(1, PS_PER_S)
    while longest and longest / unit < 10**15:
        unit /= 10
    while longest / unit >= 2**56:
        unit *= 10
    limit = instance.memory_bytes
    sizes, room, _, _ = whole_sizes([float(size) for size in held], limit or 0.0)
    problem = ReplicatedProblem(
        work_ps=np.array([round(value / unit) for value in work], np.int64),
        activation_bytes=np.array([round(value * shift) for value in passed], np.int64),
        parameter_bytes=np.array([round(value * shift) for value in parameters], np.int64),
        edge_src=edges[:, 0].copy(),
        edge_dst=edges[:, 1].copy(),
        num_devices=instance.num_devices,
        bandwidth=float(rate * shift * unit * PS_PER_S),
        count_transfers=scale > 0,
        held_bytes=None if limit is None else np.array(sizes, np.int64),
        memory_bytes=None if limit is None else room,
    )
    return problem, unit


def tensor_stage_problem(instance: VariantInstance) -> tuple[TensorStageProblem, float]:
    """The same numbers under the names of the solver, in units of powers of two that bring times
    and memory to sizes for which it can compare sums; no more devices than can be used.

    Returns:
        The problem, and how many seconds one of its units is.
    """
    second, size = _scale(_longest(instance), 10), _scale(instance.memory_bytes, 40)
    variants = tuple(
        {
            degree: tuple(
                StageVariant(
                    given.id,
                    given.seconds * second,
                    given.parameter_bytes,
                    given.memory_a * size,
                    given.memory_b * size,
                    dict(given.sync_in),
                    dict(given.sync_out),
                )
                for given in choices
            )
            for degree, choices in node.variants
            if choices
        }
        for node in instance.nodes
    )
    src, dst, moved = zip(*instance.edges, strict=True) if instance.edges else ((), (), ())
    widest = max(max(degrees) for degrees in variants)
    problem = TensorStageProblem(
        variants,
        src,
        dst,
        moved,
        min(instance.num_devices, instance.batch * widest),
        instance.memory_bytes * size,
        instance.bandwidth / second,
        instance.batch,
    )
    return problem, 1 / second


def _longest(instance: VariantInstance) -> float:
    """Seconds that no stage exceeds, roughly."""
    seconds, sizes = 0.0, 2.0 * sum(size for _, _, size in instance.edges)
    for node in instance.nodes:
        given = [variant for _, choices in node.variants for variant in choices]
        seconds += max(variant.seconds for variant in given)
        sizes += max(variant.parameter_bytes for variant in given)
    return seconds + sizes / instance.bandwidth


def _scale(value: float, exponent: int) -> float:
    """The power of two that brings a value near `2^exponent`."""
    return 2.0 ** (exponent - frexp(value)[1]) if value else 1.0


def _colors(instance: LoadInstance) -> list[int]:
    return [node.color for node in instance.nodes if node.color is not None]


def _check_times(values: list[float]) -> None:
    total = sum(values)
    if total >= _MAX_MS:
        raise InputError(
            f"Times must add up to less than 10^9 ms, these add up to {total:.3g}. "
            f"Scale the file's times down."
        )


def dataflow_problem(instance: DataflowInstance) -> tuple[Problem, Fraction]:
    """Equal devices with links that nothing waits for, and memory for everything.

    Returns:
        The problem, in whole nanoseconds, and how many of the instance's unit one stands for.
    """
    unit = _unit([*instance.compute, *instance.transfer])
    count = min(instance.num_devices, len(instance.compute))  # others stay empty
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
    costs = np.tile(np.array(compute, np.int64)[:, None], (1, count))
    machine = _equal_devices(count)
    return Problem(graph, machine, CostTable(costs, instance.about.name)), unit


def rounded_off(instance: DataflowInstance, unit: Fraction) -> Fraction:
    """What all of an instance's numbers together lose as whole multiples of a unit."""
    values = [Fraction(value) for value in (*instance.compute, *instance.transfer)]
    return sum((abs(value - round(value / unit) * unit) for value in values), Fraction(0))


def _unit(values: list[float]) -> Fraction:
    """1 if all numbers are whole, else the largest power of ten that makes them so, or nearly."""
    exact = [Fraction(value) for value in values]
    total = sum(exact)
    nearly = min(Fraction(1), total / max(1, len(exact))) / 10**9  # of one number as they go
    scale = 1
    while any(abs(value - Fraction(round(value * scale), scale)) > nearly for value in exact):
        scale *= 10
    unit = Fraction(1, scale)
    while total * 64 / unit >= 2**61:  # everything sent everywhere must fit
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
