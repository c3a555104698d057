"""Explain why devices are idle."""

from __future__ import annotations

import numpy as np

from devplace.simulator import Timeline
from devplace.simulator.memory_bounds import Needs, least_needs
from devplace.units import format_bytes

_SLOWER = 1.05
NO_GAIN = 0.98
"""Part of a step; what saves less is no gain. A matter of wording only."""


def unused_text(timeline: Timeline, load_ns: int, is_no_gain: bool) -> str:
    """Devices that run nothing, each with what is known to keep it idle, as a sentence.

    Args:
        timeline: The step.
        load_ns: Its work shared out perfectly over all devices, transfers left out.
        is_no_gain: Whether it is proved that no plan is clearly faster.
    """
    names = timeline.problem.machine.device_names
    needs = least_needs(timeline.problem)
    shares = is_no_gain and load_ns < NO_GAIN * timeline.makespan_ns
    found = []
    for device, row in enumerate(timeline.order):
        reason = "" if row else _why_never(timeline, needs, device)
        if not row and not reason and is_no_gain:
            reason = _why_no_gain(timeline, device, shares)
        if reason:
            found.append(f"{names[device]} ({reason})")
    return f" Not used: {', '.join(found)}." if found else ""


def _why_never(timeline: Timeline, needs: Needs, device: int) -> str:
    """Why no work can go to a device: it must not be used, pins, kernels, memory; else empty."""
    problem, tasks = timeline.problem, timeline.problem.core.tasks
    banned = problem.unused.get(problem.machine.device_names[device])
    if banned:
        return banned.removeprefix("is ").removeprefix("has a ")
    takes_time = (problem.core.wires.duration_ns > 0).any(axis=1)
    groups = np.unique(tasks.group[takes_time])
    allowed = groups[problem.allowed[groups, device]]
    if not len(groups):
        return ""
    if not len(allowed):
        pinned = [group in problem.pinned_groups for group in groups.tolist()]
        if all(pinned):
            return "pins keep all work elsewhere"
        return f"no kernel for any op{' that pins leave' if any(pinned) else ''}"
    lacking = int((needs.least_bytes[allowed] - needs.room_bytes[device]).min())
    if lacking <= 0:
        return ""
    exact = f", {lacking} bytes" if lacking >= 1000 else ""
    return f"too small by {format_bytes(lacking)}{exact}, even for the smallest part of the work"


def _why_no_gain(timeline: Timeline, device: int, shares: bool) -> str:
    """Why a device that could do some of the work would not shorten the step, as is proved."""
    problem = timeline.problem
    total = problem.core.wires.duration_ns.sum(axis=0)
    fastest = min(total[d] for d in problem.usable_devices)
    if not shares and total[device] > _SLOWER * fastest:
        return "too slow to help"
    return "no share of the work that may go there shortens the step"
