"""Tarnawski's latency objective, from its definition."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from devplace.instances.records import LoadInstance
from devplace.verify.throughput_objective import broken_rules, memory_of, misplaced
from devplace.verify.verdict import Verdict, exact


def verify_latency(instance: LoadInstance, device: Sequence[int], block: Sequence[int]) -> Verdict:
    """When the last node of one sample ends.

    The nodes of an accelerator are cut into blocks. A block begins when all its inputs are there
    (their producers' blocks, or CPU nodes, have ended) and takes in one piece: the output cost of
    every outside node that feeds it, the times of its nodes, the output cost of every own node
    that feeds something outside. A CPU node begins when its inputs are there, beside any others.

    Args:
        instance: What is placed.
        device: Device of each node: accelerators first, then CPUs.
        block: Number of the block each accelerator node is in, of the whole placement; ignored for
            CPU nodes.
    """
    lost = misplaced(instance, device)
    if lost:
        return Verdict(float("nan"), (lost,))
    broken = broken_rules(instance, device)
    k = instance.num_accelerators
    unit = [
        ("block", int(block[v])) if device[v] < k else ("node", v)
        for v in range(len(instance.nodes))
    ]
    members: dict[tuple[str, int], list[int]] = {}
    for v, name in enumerate(unit):
        members.setdefault(name, []).append(v)
    apart = [
        f"block {name[1]} is on devices {sorted({device[v] for v in own})}"
        for name, own in members.items()
        if len({device[v] for v in own}) > 1
    ]
    needs: dict[tuple[str, int], set[tuple[str, int]]] = {name: set() for name in members}
    for a, b in instance.edges:
        if unit[a] != unit[b]:
            needs[unit[b]].add(unit[a])
    start, finish = _times(instance, members, needs)
    if len(finish) < len(members):
        return Verdict(float("nan"), (*broken, *apart, "blocks wait for each other in a circle"))
    overlaps = _overlaps({name: device[own[0]] for name, own in members.items()}, start, finish)
    return Verdict(
        float(max(finish.values())), (*broken, *apart, *overlaps), memory_of(instance, device)
    )


def _times(
    instance: LoadInstance,
    members: dict[tuple[str, int], list[int]],
    needs: dict[tuple[str, int], set[tuple[str, int]]],
) -> tuple[dict[tuple[str, int], Fraction], dict[tuple[str, int], Fraction]]:
    """Begin and end of every unit whose inputs come at all."""
    start: dict[tuple[str, int], Fraction] = {}
    finish: dict[tuple[str, int], Fraction] = {}
    while True:
        ready = [name for name in members if name not in finish and needs[name] <= finish.keys()]
        if not ready:
            return start, finish
        for name in ready:
            start[name] = max((finish[other] for other in needs[name]), default=Fraction(0))
            finish[name] = start[name] + _duration(instance, name, members[name])


def _duration(instance: LoadInstance, name: tuple[str, int], own: Sequence[int]) -> Fraction:
    if name[0] == "node":
        return exact(instance.nodes[own[0]].cpu_ms)
    inside = set(own)
    coming = {a for a, b in instance.edges if b in inside and a not in inside}
    leaving = {a for a, b in instance.edges if a in inside and b not in inside}
    moved = sum((exact(instance.nodes[v].output_ms) for v in coming), Fraction(0))
    moved += sum(exact(instance.nodes[v].output_ms) for v in leaving)
    return moved + sum(exact(instance.nodes[v].accelerator_ms) for v in own)


def _overlaps(
    device: dict[tuple[str, int], int],
    start: dict[tuple[str, int], Fraction],
    finish: dict[tuple[str, int], Fraction],
) -> list[str]:
    """Blocks of one accelerator that run at once."""
    found = []
    rows: dict[int, list[tuple[str, int]]] = {}
    for name, d in device.items():
        if name[0] == "block":
            rows.setdefault(d, []).append(name)
    for d, row in rows.items():
        row.sort(key=lambda name: (start[name], finish[name]))
        for first, second in pairwise(row):
            if start[second] < finish[first]:
                found.append(f"blocks {first[1]} and {second[1]} of accelerator {d} overlap")
    return found
