"""Records of published placement problems, in the units and rules of their files.

Plain numbers as the file has them: nothing is rounded or scaled here, so that a value computed from
a record is the value of the file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class About:
    """Where an instance comes from.

    Attributes:
        name: Name, from the file's place.
        path: The file.
        source: Repository and paper, as told beside the file; else of the format.
        licence: As told beside the file; else that it is unknown.
        changed: Options that changed it, such as `--devices 4`; empty for the file as it is.
    """

    name: str
    path: str
    source: str = ""
    licence: str = ""
    changed: str = ""


@dataclass(frozen=True)
class LoadNode:
    """One node of a Tarnawski graph.

    Attributes:
        id: Its number in the file.
        name: Its name in the file, or its number.
        accelerator_ms, cpu_ms: Time on either kind of device, ms.
        size_bytes: Memory it takes on an accelerator.
        output_ms: Time to move its output between an accelerator and the host, ms.
        can_accelerate: False if only a CPU runs it.
        is_backward: Whether it belongs to the backward pass.
        color: Nodes of one color share a device; None: it stands alone.
    """

    id: int
    name: str
    accelerator_ms: float
    cpu_ms: float
    size_bytes: float
    output_ms: float
    can_accelerate: bool
    is_backward: bool
    color: int | None


@dataclass(frozen=True)
class LoadInstance:
    """Tarnawski et al. 2020: nodes on equal accelerators and CPUs, largest load or latency.

    Attributes:
        about: Where it comes from.
        nodes: Nodes.
        edges: Producer and consumer, as indices into `nodes`; no pair twice.
        num_accelerators, num_cpus: Devices.
        memory_bytes: Of each accelerator.
        objective: `throughput` (largest device load) or `latency` (one sample, in blocks).
    """

    about: About
    nodes: tuple[LoadNode, ...]
    edges: tuple[tuple[int, int], ...]
    num_accelerators: int
    num_cpus: int
    memory_bytes: float
    objective: str
    unit = "ms"


@dataclass(frozen=True)
class Layer:
    """One layer of a PipeDream profile.

    Attributes:
        id: Its name in the file, such as `node12`.
        name: Its description.
        compute_ms: Forward and backward time, ms.
        activation_bytes: What it hands on.
        parameter_bytes: Its parameters.
        is_input: Whether it only loads data; its times and sizes count as 0.
    """

    id: str
    name: str
    compute_ms: float
    activation_bytes: float
    parameter_bytes: float
    is_input: bool = False


@dataclass(frozen=True)
class PipelineInstance:
    """PipeDream (2019): consecutive stages, each on some replicas; slowest stage.

    Attributes:
        about: Where it comes from.
        nodes: Layers.
        edges: Producer and consumer, as indices into `nodes`.
        num_devices: Devices in all; the profiles name none, published plans have 4.
        bandwidth: Between devices, bytes/s; its planner's default is 10^9.
        memory_bytes: Of each device, or None for no limit, its planner's default.
        edge_cost_scale: Factor on what passes between stages. 0, its planner's default: free.
        objective: `throughput`.
    """

    about: About
    nodes: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    num_devices: int = 4
    bandwidth: float = 1e9
    memory_bytes: float | None = None
    edge_cost_scale: float = 0.0
    objective = "throughput"
    unit = "s"


@dataclass(frozen=True)
class Variant:
    """One way to run a Piper layer on `t` devices.

    Attributes:
        id: Such as `vanilla` or `activation recomp`.
        seconds: Time per sample, s.
        parameter_bytes: Weights, for what data parallelism has to keep equal.
        memory_a, memory_b: Memory is `a * y + b` bytes with `y` samples in flight.
        sync_in: Producer (index) -> bytes more on the edge from it.
        sync_out: Consumer (index) -> bytes more on the edge to it.
    """

    id: str
    seconds: float
    parameter_bytes: float
    memory_a: float
    memory_b: float
    sync_in: tuple[tuple[int, float], ...]
    sync_out: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class VariantNode:
    """One layer of a Piper graph: for every degree of tensor parallelism its variants."""

    id: int
    name: str
    variants: tuple[tuple[int, tuple[Variant, ...]], ...]


@dataclass(frozen=True)
class VariantInstance:
    """Piper (2021): stages with data and tensor parallelism and recomputation; slowest stage.

    Attributes:
        about: Where it comes from.
        nodes: Layers.
        edges: Producer, consumer (indices) and bytes.
        num_devices: Devices.
        memory_bytes: Of each device.
        bandwidth: Bytes/s.
        batch: Samples (micro-batches) in a batch.
        objective: `throughput`.
    """

    about: About
    nodes: tuple[VariantNode, ...]
    edges: tuple[tuple[int, int, float], ...]
    num_devices: int
    memory_bytes: float
    bandwidth: float
    batch: int
    objective = "throughput"
    unit = "s"


@dataclass(frozen=True)
class DataflowInstance:
    """DOPPLER (2026): ops on equal devices, transfers without contention, no memory; makespan.

    Attributes:
        about: Where it comes from.
        compute: Time of each op, in the file's unit.
        transfer: Time to send its output to another device, in the file's unit.
        kinds: Kind of each op; empty where the file has none.
        edges: Producer and consumer, no pair twice.
        num_devices: Devices; the files name none, published results have 4.
        objective: `makespan`.
    """

    about: About
    compute: tuple[float, ...]
    transfer: tuple[float, ...]
    kinds: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    num_devices: int = 4
    objective = "makespan"
    unit = "flop-like"


Instance = LoadInstance | PipelineInstance | VariantInstance | DataflowInstance


def fingerprint(instance: Instance) -> str:
    """Text that changes with every number of the instance, not with its name or place."""
    parts = [type(instance).__name__, instance.objective]
    for field in fields(instance):
        if field.name != "about":
            parts.append(repr(_plain(getattr(instance, field.name))))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Numbers only: no names of nodes; a whole float is the integer."""
    if is_dataclass(value):
        shown = [f.name for f in fields(value) if f.name not in ("id", "name")]
        return [_plain(getattr(value, name)) for name in shown]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int | float) else value
