"""DOPPLER's makespan, from its definition."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from devplace.instances.records import DataflowInstance
from devplace.verify.verdict import Verdict, exact


def verify_makespan(
    instance: DataflowInstance, device: Sequence[int], order: Sequence[Sequence[int]]
) -> Verdict:
    """When the last op ends, each device running its ops one by one in the given order.

    An op begins when the one before it on its device has ended and all its inputs are there: those
    made on the same device at the end of their op, others a transfer time later. Transfers do not
    wait for anything.

    Args:
        instance: What is placed.
        device: Device of each op.
        order: For each device the ops it runs, in order.
    """
    count = len(instance.compute)
    if len(device) != count or len(order) != instance.num_devices:
        return Verdict(float("nan"), (f"{len(device)} devices of ops, {len(order)} orders",))
    listed = sorted((op, d) for d, row in enumerate(order) for op in row)
    if listed != [(op, device[op]) for op in range(count)]:
        return Verdict(float("nan"), ("the orders do not list each op once, on its device",))
    inputs: list[list[int]] = [[] for _ in range(count)]
    for a, b in instance.edges:
        inputs[b].append(a)
    finish: dict[int, Fraction] = {}
    done = [0] * len(order)
    rows = [(d, row) for d, row in enumerate(order) if row]
    is_moving = True
    while is_moving:
        is_moving = False
        for d, row in rows:
            while done[d] < len(row) and all(a in finish for a in inputs[row[done[d]]]):
                op = row[done[d]]
                begin = finish[row[done[d] - 1]] if done[d] else Fraction(0)
                for a in inputs[op]:
                    way = exact(instance.transfer[a]) if device[a] != d else Fraction(0)
                    begin = max(begin, finish[a] + way)
                finish[op] = begin + exact(instance.compute[op])
                done[d] += 1
                is_moving = True
    if len(finish) < count:
        stuck = next(row[n] for row, n in zip(order, done, strict=True) if n < len(row))
        return Verdict(float("nan"), (f"op {stuck} waits for an op that waits for it",))
    return Verdict(float(max(finish.values())))
