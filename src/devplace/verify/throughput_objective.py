"""Tarnawski's throughput objective, from its definition."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from devplace.instances.records import LoadInstance
from devplace.verify.verdict import Verdict, exact


def verify_throughput(instance: LoadInstance, device: Sequence[int]) -> Verdict:
    """The largest device load of a placement.

    Load of an accelerator: times of its nodes, the output cost of every outside node that feeds it
    (once), and that of every own node that feeds another device (once). Load of a CPU: times of
    its nodes.

    Args:
        instance: What is placed.
        device: Device of each node: accelerators first, then CPUs.
    """
    lost = misplaced(instance, device)
    if lost:
        return Verdict(float("nan"), (lost,))
    loads = []
    for d, own in _shares(device).items():
        if d >= instance.num_accelerators:
            loads.append(sum((exact(instance.nodes[v].cpu_ms) for v in own), Fraction(0)))
            continue
        load = sum((exact(instance.nodes[v].accelerator_ms) for v in own), Fraction(0))
        inside = set(own)
        coming = {a for a, b in instance.edges if b in inside and a not in inside}
        leaving = {a for a, b in instance.edges if a in inside and b not in inside}
        load += sum(exact(instance.nodes[v].output_ms) for v in coming)
        load += sum(exact(instance.nodes[v].output_ms) for v in leaving)
        loads.append(load)
    broken = broken_rules(instance, device)
    return Verdict(float(max(loads)), broken, memory_of(instance, device))


def memory_of(instance: LoadInstance, device: Sequence[int]) -> tuple[float, ...]:
    """Bytes on each accelerator."""
    used = [0.0] * instance.num_accelerators
    for d, own in _shares(device).items():
        if d < len(used):
            used[d] = float(sum(exact(instance.nodes[v].size_bytes) for v in own))
    return tuple(used)


def _shares(device: Sequence[int]) -> dict[int, list[int]]:
    """Nodes of each device that has some."""
    shares: dict[int, list[int]] = {}
    for v, d in enumerate(device):
        shares.setdefault(d, []).append(v)
    return dict(sorted(shares.items()))


def misplaced(instance: LoadInstance, device: Sequence[int]) -> str:
    """Why this is no placement at all; empty if it is one."""
    count = instance.num_accelerators + instance.num_cpus
    if len(device) != len(instance.nodes):
        return f"{len(device)} devices are given for {len(instance.nodes)} nodes"
    for node, d in zip(instance.nodes, device, strict=True):
        if not 0 <= d < count:
            return f"node {node.name!r} is on device {d} of {count}"
    return ""


def broken_rules(instance: LoadInstance, device: Sequence[int]) -> tuple[str, ...]:
    """Rules a placement breaks, in words: support, co-location, memory."""
    broken = []
    home: dict[int, int] = {}
    for node, d in zip(instance.nodes, device, strict=True):
        if d < instance.num_accelerators and not node.can_accelerate:
            broken.append(f"node {node.name!r} is on accelerator {d}, but only a CPU runs it")
        if node.color is not None and home.setdefault(node.color, d) != d:
            broken.append(f"node {node.name!r} is apart from the others of color {node.color}")
    for d, own in _shares(device).items():
        if d >= instance.num_accelerators:
            continue
        used = sum((exact(instance.nodes[v].size_bytes) for v in own), Fraction(0))
        if used > exact(instance.memory_bytes):
            broken.append(
                f"accelerator {d} holds {float(used):.0f} bytes, more than its "
                f"{instance.memory_bytes:.0f}"
            )
    return tuple(broken)
