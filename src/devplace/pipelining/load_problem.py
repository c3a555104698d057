"""Placing nodes on equal accelerators and equal CPUs so that the largest load is smallest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.errors import ProblemError
from devplace.units import format_bytes

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

PS_PER_MS = 10**9


@dataclass(frozen=True, eq=False)
class LoadProblem:
    """Nodes to place on `k` equal accelerators and `l` equal CPUs; smallest largest load wins.

    The steady state of a pipeline: in each period every device does its own share once, so that
    the largest load is the time per sample. Times are integer picoseconds, so that published
    values in fractions of a millisecond are held exactly. In shapes, `N` is nodes, `E` edges.

    Attributes:
        accelerator_ps: Time on an accelerator. `[N]`
        cpu_ps: Time on a CPU. `[N]`
        can_accelerate: False for nodes that only a CPU runs. `[N]`
        size_bytes: Memory held where the node lies. `[N]`
        edge_src: Producing node. `[E]`
        edge_dst: Consuming node. `[E]`
        edge_ps: Time to move the producer's output between an accelerator and the host; equal on
            all edges that leave one node. `[E]`
        color: Co-location class, -1 for none: nodes of one class share a device. `[N]`
        is_backward: Nodes of the backward pass. `[N]`
        num_accelerators: `k`
        num_cpus: `l`
        memory_bytes: Limit of each accelerator; CPUs have none.

    Raises:
        ProblemError: Shapes, ranges or edge costs do not fit together.

    Source: Tarnawski et al. (2020), "Efficient Algorithms for Device Placement of DNN Graph
    Operators", arXiv 2006.16423, throughput objective.
    """

    accelerator_ps: I64
    cpu_ps: I64
    can_accelerate: Bools
    size_bytes: I64
    edge_src: I32
    edge_dst: I32
    edge_ps: I64
    color: I32
    is_backward: Bools
    num_accelerators: int
    num_cpus: int
    memory_bytes: int

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            array = np.ascontiguousarray(getattr(self, name), kind)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        _check_shapes(self)
        _check_values(self)

    @property
    def num_nodes(self) -> int:
        """`N`"""
        return len(self.accelerator_ps)

    @property
    def num_devices(self) -> int:
        """`k + l`; devices `0..k-1` are the accelerators."""
        return self.num_accelerators + self.num_cpus


_KINDS: dict[str, type[np.generic]] = {
    "accelerator_ps": np.int64,
    "cpu_ps": np.int64,
    "can_accelerate": np.bool_,
    "size_bytes": np.int64,
    "edge_src": np.int32,
    "edge_dst": np.int32,
    "edge_ps": np.int64,
    "color": np.int32,
    "is_backward": np.bool_,
}
_PER_EDGE = ("edge_src", "edge_dst", "edge_ps")


def _check_shapes(problem: LoadProblem) -> None:
    nodes, edges = len(problem.accelerator_ps), len(problem.edge_src)
    for name in _KINDS:
        wanted = (edges if name in _PER_EDGE else nodes,)
        shape = getattr(problem, name).shape
        if shape != wanted:
            raise ProblemError(
                f"{name} must have shape {wanted}, got {shape}. Give one value each."
            )
    for name, least in (("num_accelerators", 0), ("num_cpus", 0), ("memory_bytes", 0)):
        if getattr(problem, name) < least:
            raise ProblemError(f"{name} must be at least {least}, got {getattr(problem, name)}.")
    if problem.num_devices < 1:
        raise ProblemError("A load problem needs a device: 0 accelerators and 0 CPUs given.")


def _check_values(problem: LoadProblem) -> None:
    for name in ("accelerator_ps", "cpu_ps", "size_bytes", "edge_ps"):
        array = getattr(problem, name)
        if len(array) and array.min() < 0:
            at = int(array.argmin())
            raise ProblemError(f"{name}[{at}] must not be negative, got {array[at]}.")
        if name != "edge_ps" and len(array) and float(array.astype(float).sum()) >= 2**60:
            raise ProblemError(f"{name} must sum to less than 2^60. Use a coarser unit.")
    for name in ("edge_src", "edge_dst"):
        array = getattr(problem, name)
        if len(array) and not 0 <= array.min() <= array.max() < problem.num_nodes:
            raise ProblemError(f"{name} must name nodes 0 to {problem.num_nodes - 1}.")
    cost = producer_ps(problem)  # once per node, however many edges leave it
    if float(cost.astype(float).sum()) >= 2**60:
        raise ProblemError("edge_ps must sum to less than 2^60 over nodes. Use a coarser unit.")
    uneven = np.flatnonzero(problem.edge_ps != cost[problem.edge_src])
    if len(uneven):
        at = int(uneven[0])
        raise ProblemError(
            f"All edges that leave one node must cost the same: node {problem.edge_src[at]} has "
            f"edges of {problem.edge_ps[at]} ps and {cost[problem.edge_src[at]]} ps."
        )


def producer_ps(problem: LoadProblem) -> I64:
    """Cost of moving each node's output, 0 where nothing leaves it. `[N]`"""
    cost = np.zeros(problem.num_nodes, np.int64)
    np.maximum.at(cost, problem.edge_src, problem.edge_ps)
    return cost


def loads(problem: LoadProblem, device: I32) -> I64:
    """Load of each device, ps. `[k + l]`

    An accelerator's load is the time of its nodes, plus the cost of each distinct outside node that
    feeds it, plus the cost of each own node with an edge that leaves it, once per node. A CPU's
    load is the time of its nodes.

    Args:
        device: Device of each node: accelerators `0..k-1`, then CPUs. `[N]`

    Raises:
        ProblemError: A device index is out of range.
    """
    device = check_devices(problem, device)
    k = problem.num_accelerators
    load = np.zeros(problem.num_devices, np.int64)
    np.add.at(load, device, np.where(device < k, problem.accelerator_ps, problem.cpu_ps))
    src, dst = problem.edge_src, problem.edge_dst
    crosses = device[src] != device[dst]
    src, dst = src[crosses], dst[crosses]
    touched = np.concatenate(
        [
            src.astype(np.int64) * problem.num_devices + device[dst],
            src.astype(np.int64) * problem.num_devices + device[src],
        ]
    )
    touched = np.unique(touched)
    where = touched % problem.num_devices
    paid = where < k
    cost = producer_ps(problem)[touched // problem.num_devices]
    np.add.at(load, where[paid], cost[paid])
    return load


def held_bytes(problem: LoadProblem, device: I32) -> I64:
    """Memory held on each device. `[k + l]`"""
    device = check_devices(problem, device)
    held = np.zeros(problem.num_devices, np.int64)
    np.add.at(held, device, problem.size_bytes)
    return held


def check_devices(problem: LoadProblem, device: I32) -> I32:
    """`device` as int32 of the right shape and range.

    Raises:
        ProblemError: Wrong shape, or an index out of range.
    """
    device = np.asarray(device, np.int32)
    if device.shape != (problem.num_nodes,):
        raise ProblemError(
            f"A placement must have shape ({problem.num_nodes},), got {device.shape}."
        )
    if len(device) and not 0 <= device.min() <= device.max() < problem.num_devices:
        raise ProblemError(
            f"A placement must use devices 0 to {problem.num_devices - 1}, "
            f"got {device.min()} to {device.max()}."
        )
    return device


def broken_rule(problem: LoadProblem, device: I32) -> str:
    """The first rule that a placement breaks, in words; empty when it is valid."""
    device = check_devices(problem, device)
    k = problem.num_accelerators
    wrong = np.flatnonzero((device < k) & ~problem.can_accelerate)
    if len(wrong):
        return f"node {wrong[0]} runs on CPUs only but lies on accelerator {device[wrong[0]]}"
    classes = problem.color[problem.color >= 0]
    for color in np.unique(classes):
        used = np.unique(device[problem.color == color])
        if len(used) > 1:
            return f"co-location class {color} is spread over devices {used.tolist()}"
    held = held_bytes(problem, device)[:k]
    full = np.flatnonzero(held > problem.memory_bytes)
    if len(full):
        return (
            f"accelerator {full[0]} holds {format_bytes(int(held[full[0]]))} but has "
            f"{format_bytes(problem.memory_bytes)}"
        )
    return ""
