"""Report of a throughput plan, in words and figures."""

from __future__ import annotations

from typing import Any

from devplace.pipelining import step_loads
from devplace.placers import Result
from devplace.plan import Plan
from devplace.problem import Problem
from devplace.simulator import Timeline
from devplace.units import format_time

RUNS_AS = (
    "a placement: devplace runs one step at a time, which takes the time of one step alone. The "
    "largest load is the time per step of a runtime that overlaps steps of several batches; each "
    "batch in flight holds its activations besides, and a training step then reads weights that "
    "are some steps old"
)


def load_rows(result: Result, single: Timeline) -> list[tuple[str, str]]:
    """Largest load, its bound, every device's load, one step alone, and what the plan runs as.

    Args:
        result: What was found.
        single: Best step on one device.
    """
    names = result.timeline.problem.machine.device_names
    alone = single.makespan_ns
    rate = f", {alone / result.value_ns:.2f}x the rate of one device" if result.value_ns else ""
    gap = f"{result.gap:.1%} above it" if result.gap < 1 else f"{1 + result.gap:.1f}x as large"
    loads = [
        f"{name} {format_time(load)}"
        for name, load in zip(names, _loads(result), strict=True)
        if load
    ]
    return [
        ("largest load", f"{format_time(result.value_ns)} per step of a full pipeline{rate}"),
        ("lower bound", f"{format_time(result.bound_ns)}; the load is {gap}, {result.status}"),
        ("loads", ", ".join(loads) or "none"),
        ("step alone", f"{format_time(result.step_ns)} predicted, as devplace runs it"),
        ("runs as", RUNS_AS),
    ]


def is_for_throughput(result: Result) -> bool:
    """Whether the largest load was to be small."""
    return result.objective.name == "throughput"


def value_json(result: Result) -> dict[str, Any]:
    """What was to be small and what is known of it, ns; empty where that is the step."""
    if not result.has_own_value:
        return {}
    if not is_for_throughput(result):
        own = {"value_ns": result.value_ns, "bound_ns": result.bound_ns}
        return {"objective": result.objective.name, **own, "status": result.status}
    names = result.timeline.problem.machine.device_names
    return {
        "objective": result.objective.name,
        "max_load_ns": result.value_ns,
        "load_bound_ns": result.bound_ns,
        "status": result.status,
        "loads_ns": dict(zip(names, _loads(result), strict=True)),
    }


def _loads(result: Result) -> list[int]:
    found: list[int] = step_loads(result.timeline.problem, result.timeline.task_devices).tolist()
    return found


def plan_load_lines(plan: Plan, problem: Problem) -> list[str]:
    """For a plan that was made for a full pipeline: its largest load, computed again."""
    if plan.request.get("objective") != "throughput":
        return []
    loads = step_loads(problem, problem.task_devices(plan.as_placement()))
    name = problem.machine.device_names[int(loads.argmax())]
    return [
        f"Made for throughput: the largest load in a full pipeline is "
        f"{format_time(int(loads.max()))} per step, on {name}. It runs as {RUNS_AS}."
    ]
