"""Errors for infeasible problems: which limit, how much is missing, what would help."""

from __future__ import annotations

from devplace.errors import InfeasibleError
from devplace.placers.margin_retry import with_priority
from devplace.placers.simple.single import all_on
from devplace.problem import Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.bounds import LowerBound
from devplace.simulator.memory_bounds import tightest
from devplace.units import format_bytes


def infeasible(timeline: Timeline, placer: str, bound: LowerBound | None = None) -> InfeasibleError:
    """The error for a placement that does not fit: which limit, how much is missing, what helps,
    and whether it is proved that nothing fits.

    Args:
        timeline: The nearest placement found.
        placer: Name of the placer.
        bound: Bounds of the problem, with what the placer proved.
    """
    if bound is not None and bound.lack not in ("", "exact"):
        return no_room(timeline.problem, bound)
    missing = timeline.missing_bytes
    worst = max(missing, key=lambda name: missing[name])
    need = _needed_bytes(timeline)[worst]
    first = (
        f"No placement can fit (proved by placer {placer}): in the nearest one"
        if bound is not None and bound.is_infeasible
        else f"Placer {placer} found no placement within the memory limits (whether there is one "
        f"is unknown): in the nearest one"
    )
    return InfeasibleError(
        f"{first} {worst} needs "
        f"{format_bytes(need)}, {format_bytes(missing[worst])} more than its limit of "
        f"{format_bytes(need - missing[worst])}. {_remedy(timeline)}{_surely(timeline)}",
        missing,
    )


def _needed_bytes(timeline: Timeline) -> dict[str, int]:
    """What each over-full device or pool would need, by name."""
    machine = timeline.problem.machine
    peaks = dict(zip(machine.device_names, timeline.peak_bytes, strict=True))
    peaks |= {
        pool.name: peak for pool, peak in zip(machine.pools, timeline.pool_peak_bytes, strict=True)
    }
    return {name: int(peaks[name]) for name in timeline.missing_bytes}


def _remedy(timeline: Timeline) -> str:
    """What would make this very placement fit, to the byte."""
    problem, needed = timeline.problem, _needed_bytes(timeline)
    index = problem.machine.device_index
    limits = ", ".join(f"{name}={need}" for name, need in needed.items())
    if all(
        name in index and need <= problem.machine.devices[index[name]].usable_bytes
        for name, need in needed.items()
    ):
        first = f"Raise the limits to at least {limits} (bytes)"
    else:
        first = f"It would fit with usable memory of at least {limits} (bytes)"
    meta, again = problem.graph.meta, ""
    if meta.get("mode") == "train" and not meta.get("recompute"):
        again = "compute blocks again in the backward pass (recompute=True, --recompute), "
    return f"{first}, {again}lower the batch size, {_on_cpus(problem)}or add a device."


def _on_cpus(problem: Problem) -> str:
    """The advice to use CPUs that are left out beside GPUs."""
    devices = problem.machine.devices
    if all(devices[d].traits.is_host for d in problem.usable_devices):
        return ""
    hosts = [device.name for device in devices if device.traits.is_host]
    left = [name for name in hosts if problem.unused.get(name) == "is excluded"]
    return f"let ops go to {left[0]} (uses_cpu=True, --cpu), " if left else ""


def _surely(timeline: Timeline) -> str:
    """What is enough whatever the placer finds: room for everything on one device."""
    single = _nearest_single(timeline.problem)
    if not single.missing_bytes or _needed_bytes(single) == _needed_bytes(timeline):
        return ""
    limits = ", ".join(f"{name}={need}" for name, need in _needed_bytes(single).items())
    return f" With {limits} (bytes) one device holds the whole step."


def _nearest_single(problem: Problem) -> Timeline:
    placements = [all_on(problem, device) for device in problem.usable_devices]
    single = [simulate(problem, with_priority(problem, one)) for one in placements]
    return min(single, key=lambda timeline: sum(timeline.missing_bytes.values()))


def no_room(problem: Problem, bound: LowerBound) -> InfeasibleError:
    nearest = _nearest_single(problem)
    lacking = bound.static_bytes - bound.capacity_bytes
    if bound.lack == "op":
        op, needed, room = tightest(problem)
        why = (
            f"op {problem.graph.ops[op].name!r} alone needs {format_bytes(needed)} with what it "
            f"reads or what must sit with it, a device that may run it can hold "
            f"{format_bytes(room)} at most"
        )
    elif bound.lack == "bound groups":
        why = "what may only go to some of the devices needs more memory than these have"
    else:
        why = (
            f"parameters, optimizer state and inputs alone need "
            f"{format_bytes(bound.static_bytes)}, all usable devices together have "
            f"{format_bytes(bound.capacity_bytes)}, {format_bytes(lacking)} too little"
        )
    return InfeasibleError(
        f"No placement can fit (proved): {why}. {_remedy(nearest)}",
        {"all devices": lacking} if lacking > 0 else nearest.missing_bytes,
    )
