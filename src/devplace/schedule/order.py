"""Check that an order can be run: complete, on the right devices, and free of cycles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from devplace.graph import OpGraph

Order = Sequence[Sequence[int]]


def order_fault(
    graph: OpGraph, device_of_op: Sequence[int], order: Order, device_names: Sequence[str]
) -> str:
    """Why devices cannot keep to an order; empty if they can.

    Args:
        graph: The step.
        device_of_op: Device index per op, shape `[V]`.
        order: Per device the indices of its ops (no sources, no views) in execution order.
        device_names: Names of the devices, shape `[D]`.

    Complexity: O(V + E).
    """
    try:
        order = [list(row) for row in order]
    except TypeError:
        return f"An order has one list of ops per device, got {order!r}."
    fault = _fault_of_lists(graph, device_of_op, order, device_names)
    found = None if fault else waiting_ops(graph, order)
    if found is None:
        return fault
    consumer, producer = found
    pairs = (pair for ops in order for pair in pairwise(ops))
    ahead = next((graph.ops[first].name for first, second in pairs if second == consumer), "")
    return (
        f"The order can never finish: op {graph.ops[consumer].name!r} on "
        f"{device_names[device_of_op[consumer]]} waits for op {graph.ops[producer].name!r} on "
        f"{device_names[device_of_op[producer]]}, which in turn waits for it"
        f"{f' (it runs after {ahead!r})' if ahead else ''}. "
        "Make the plan again, or order every op after the ops it reads."
    )


def waiting_ops(graph: OpGraph, order: Order) -> tuple[int, int] | None:
    """Two ops that wait for each other in this order; None if all can run.

    Returns:
        (consumer, producer): the producer, directly or not, comes after the consumer.

    Complexity: O(V + E).
    """
    reads = graph.needs
    before = [-1] * len(reads)
    for row in order:
        for first, second in pairwise(row):
            before[second] = first
    needs = [(*row, ahead) if ahead >= 0 else row for row, ahead in zip(reads, before, strict=True)]
    stuck = _never_ready(needs)
    if not stuck:
        return None
    op = min(stuck)
    path: dict[int, int] = {}  # stuck op -> a stuck op it waits for, in the order of the walk
    while op not in path:
        path[op] = next(need for need in needs[op] if need in stuck)
        op = path[op]
    # `op` is on a cycle; orders alone are none, so it holds data too
    while path[op] not in reads[op]:
        op = path[op]
    return op, path[op]


def _fault_of_lists(
    graph: OpGraph, device_of_op: Sequence[int], order: Order, device_names: Sequence[str]
) -> str:
    """What is missing, listed twice or listed elsewhere."""
    ops, num_devices = graph.ops, len(device_names)
    if len(device_of_op) != len(ops):
        return f"{len(device_of_op)} ops are placed; the graph has {len(ops)}. Make the plan again."
    if len(order) != num_devices:
        return (
            f"An order has one list of ops per device: {len(order)} lists, {num_devices} devices. "
            f"Make the order again."
        )
    listed = [0] * len(ops)
    for device, row in enumerate(order):
        for op in row:
            is_whole = isinstance(op, (int, np.integer)) and not isinstance(op, bool)
            if not is_whole or not 0 <= op < len(ops):
                return (
                    f"The order of {device_names[device]} names op {op!r}; ops are whole numbers "
                    f"from 0 to {len(ops) - 1}. Make the order again."
                )
            listed[op] += 1
            if device_of_op[op] != device:
                return (
                    f"Op {ops[op].name!r} is ordered on {device_names[device]} but placed on "
                    f"device {device_of_op[op]}. Order every op where it is placed."
                )
    for op, (record, device) in enumerate(zip(ops, device_of_op, strict=True)):
        if not 0 <= device < num_devices:
            return (
                f"Op {record.name!r} is placed on device {device}; there are {num_devices} "
                f"devices. Make the plan again."
            )
        if record.is_view and device != device_of_op[graph.producer[record.alias_of]]:
            return (
                f"View {record.name!r} is placed on {device_names[device]}, apart from "
                f"{graph.tensors[record.alias_of].name!r}, whose memory it shares. Place a view "
                f"with its base."
            )
        expected = 0 if record.is_source or record.is_view else 1
        if listed[op] != expected:
            return (
                f"Op {record.name!r} is ordered {listed[op]} times, expected {expected}. "
                "Sources and views are not ordered, every other op is ordered once."
            )
    return ""


def _never_ready(needs: Sequence[Sequence[int]]) -> set[int]:
    """Ops that wait for themselves, or for one that does."""
    missing = [len(row) for row in needs]
    users: list[list[int]] = [[] for _ in needs]
    for op, row in enumerate(needs):
        for need in row:
            users[need].append(op)
    ready = [op for op, count in enumerate(missing) if count == 0]
    while ready:
        for user in users[ready.pop()]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return {op for op, count in enumerate(missing) if count}
