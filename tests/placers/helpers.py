"""What tests of placers share."""

from __future__ import annotations

from devplace.placers import Result


def placed(result: Result) -> dict[str, str]:
    """Device name of every op by name."""
    problem = result.timeline.problem
    names = problem.machine.device_names
    pairs = zip(problem.graph.ops, result.placement.devices, strict=True)
    return {op.name: names[device] for op, device in pairs}
