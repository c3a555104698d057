"""Check that an order can be run: complete, on the right devices, and free of cycles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from devplace.errors import PlanError
from devplace.graph import OpGraph
from devplace.graph.waiting import waiting_pair


def check_order(
    graph: OpGraph,
    device_of_op: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
    dependencies: Sequence[Sequence[int]],
) -> None:
    """Refuse an order that would stall or leave something out.

    Args:
        graph: The step.
        device_of_op: Device index per op, shape `[V]`.
        order: Per device the indices of its ops in execution order.
        device_names: Names of the devices, shape `[D]`.
        dependencies: Per op the ops whose results it needs, views looked through.

    Raises:
        PlanError: An op is missing, repeated or on another device; or the order and the data
            dependencies form a cycle, of which two ops are named.

    Complexity: O(V + E).
    """
    _check_placement(graph, device_of_op, order, device_names)
    found = waiting_pair(dependencies, order)
    if found is not None:
        consumer, producer = found
        pairs = (pair for ops in order for pair in pairwise(ops))
        ahead = next((graph.ops[first].name for first, second in pairs if second == consumer), "")
        raise PlanError(
            f"The order can never finish: op {graph.ops[consumer].name!r} on "
            f"{device_names[device_of_op[consumer]]} waits for op {graph.ops[producer].name!r} on "
            f"{device_names[device_of_op[producer]]}, which in turn waits for it"
            f"{f' (it runs after {ahead!r})' if ahead else ''}. "
            "Make the plan again, or order every op after the ops it reads."
        )


def _check_placement(
    graph: OpGraph,
    device_of_op: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
) -> None:
    num_devices = len(device_names)
    if len(device_of_op) != len(graph.ops) or len(order) != num_devices:
        raise PlanError(
            f"The plan places {len(device_of_op)} ops and orders {len(order)} devices; the graph "
            f"has {len(graph.ops)} ops and the machine {num_devices} devices. Make the plan again."
        )
    seen = [0] * len(graph.ops)
    for device, ops in enumerate(order):
        for op in ops:
            if not 0 <= op < len(graph.ops):
                raise PlanError(f"The order of {device_names[device]} names op {op}; no such op.")
            seen[op] += 1
            if device_of_op[op] != device:
                raise PlanError(
                    f"Op {graph.ops[op].name!r} is ordered on {device_names[device]} but placed on "
                    f"device {device_of_op[op]}. Order every op where it is placed."
                )
    for op, record in enumerate(graph.ops):
        if not 0 <= device_of_op[op] < num_devices:
            raise PlanError(
                f"Op {record.name!r} is placed on device {device_of_op[op]}; there are "
                f"{num_devices} devices."
            )
        if record.is_view and device_of_op[op] != device_of_op[graph.producer[record.alias_of]]:
            base = graph.tensors[record.alias_of].name
            raise PlanError(
                f"View {record.name!r} is placed on {device_names[device_of_op[op]]}, apart from "
                f"{base!r}, whose memory it shares. Place a view with its base."
            )
        expected = 0 if record.is_source or record.is_view else 1
        if seen[op] != expected:
            raise PlanError(
                f"Op {record.name!r} is ordered {seen[op]} times, expected {expected}. "
                "Sources and views are not ordered, every other op is ordered once."
            )
