"""Break down the step time and name what limits it."""

from __future__ import annotations

from typing import Literal

import msgspec

from devplace.graph.members import module_shares
from devplace.report.summary import WORTH_TELLING, best_single, single_name
from devplace.report.unused import NO_GAIN, unused_text
from devplace.simulator import Timeline
from devplace.simulator.bounds import LowerBound, lower_bound
from devplace.units import format_time

LimitedBy = Literal["chain", "transfers", "load", "critical path"]
# Shares are of the step. Where they draw the line is a matter of wording only.
_MANY_TRANSFERS = 0.25
_BUSY = 0.9


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the step's time is made of.

    Attributes:
        limited_by: `chain`: one device is as fast as any number of devices can be. `transfers`:
            more than a quarter of the step the critical path waits for links. `load`: the
            busiest device has hardly a pause. `critical path`: ops that wait for one another.
        lower_bound_ns: No plan can be faster.
        chain_ns: Longest chain of ops, with what must cross links (`critical_path_ns`).
        load_ns: All work shared out perfectly.
        combined_ns: The best of both together, with what memory adds.
        bound_batch_ns: Copies of the batch that no plan is without, before its first op.
        single_ns: Best step on one device (`best_single`).
        single_fits: Whether that is within its memory limit.
        single_name: What it is called: pins or kernels may part it.
        path_compute_ns: Time of the ops on the plan's critical path.
        path_wait_ns: Rest of the critical path: transfers and their queues.
        path_modules: Module -> time of its ops on the critical path, shares of fused groups
            included; most first, at most five.
        busiest: Device that works most.
        busiest_ns: How long it works.
    """

    limited_by: LimitedBy
    lower_bound_ns: int
    chain_ns: int
    load_ns: int
    combined_ns: int
    bound_batch_ns: int
    single_ns: int
    single_fits: bool
    single_name: str
    path_compute_ns: int
    path_wait_ns: int
    path_modules: dict[str, int]
    busiest: str
    busiest_ns: int


def find_limits(timeline: Timeline, bound: LowerBound | None = None) -> Limits:
    """What limits a simulated step.

    Args:
        timeline: The step.
        bound: Lower bounds, if already known.
    """
    problem = timeline.problem
    bound = bound or lower_bound(problem)
    single = best_single(problem, [timeline])
    path = timeline.critical_path()
    spent = (timeline.finish_ns - timeline.start_ns)[path].tolist()
    modules: dict[str, int] = {}
    for op, ns in zip(path, spent, strict=True):
        for module, share in module_shares(problem.graph.ops[op], ns).items():
            modules[module] = modules.get(module, 0) + share
    top = dict(sorted(modules.items(), key=lambda item: -item[1])[:5])
    busiest = int((timeline.busy_ns // problem.core.wires.streams).argmax())
    compute = sum(spent)
    wait = timeline.makespan_ns - timeline.batch_ns - compute
    busy = int(timeline.busy_ns[busiest] // problem.core.wires.streams[busiest])
    limited_by: LimitedBy = "critical path"
    if bound.step_ns >= NO_GAIN * single.makespan_ns and single.is_feasible:
        limited_by = "chain"
    elif wait > _MANY_TRANSFERS * timeline.makespan_ns:
        limited_by = "transfers"
    elif busy > _BUSY * timeline.makespan_ns:
        limited_by = "load"
    return Limits(
        limited_by=limited_by,
        lower_bound_ns=bound.step_ns,
        chain_ns=bound.critical_path_ns,
        load_ns=bound.load_ns,
        combined_ns=bound.combined_ns,
        bound_batch_ns=bound.batch_ns,
        single_ns=single.makespan_ns,
        single_fits=single.is_feasible,
        single_name=single_name(single),
        path_compute_ns=compute,
        path_wait_ns=wait,
        path_modules=top,
        busiest=problem.machine.device_names[busiest],
        busiest_ns=busy,
    )


def limits_text(timeline: Timeline, limits: Limits) -> str:
    """What limits the step, as a paragraph."""
    usable = len(timeline.problem.usable_devices)
    step = format_time(timeline.makespan_ns)
    chain, load = format_time(limits.chain_ns), format_time(limits.load_ns)
    is_no_gain = limits.limited_by == "chain" and limits.chain_ns < _BUSY * limits.lower_bound_ns
    used = sum(map(bool, timeline.order))
    rest = unused_text(timeline, limits.load_ns, is_no_gain) + _batch_text(timeline)
    if limits.limited_by == "chain" and usable == 1:
        alone = f"The step takes {step} on the only usable device, {limits.busiest}."
        return alone + rest
    if limits.limited_by == "chain" or used == 1:
        return _no_gain_text(limits, usable, used, step) + rest
    path = (
        f"{format_time(limits.path_compute_ns)} of ops and "
        f"{format_time(limits.path_wait_ns)} of transfers"
    )
    share = limits.busiest_ns / max(1, timeline.makespan_ns)
    busy = f"the busiest device, {limits.busiest}, works {share:.0%} of the step"
    first = {
        "transfers": f"Transfers limit the step of {step}: the critical path is {path}; {busy}.",
        "load": f"Load limits the step of {step}: {busy}; the critical path is {path}.",
        "critical path": f"The critical path limits the step of {step}: it is {path}; {busy}.",
    }[limits.limited_by]
    fits = "" if limits.single_fits else " but does not hold it in any order tried"
    return (
        f"{first} {_modules(limits, 'Most')}. It uses {used} of {usable} devices; no plan can "
        f"be below {format_time(limits.lower_bound_ns)} (longest chain {chain}, work shared out "
        f"{load}{_more_of_bound(limits)}), {limits.single_name} takes "
        f"{format_time(limits.single_ns)}{fits}.{rest}"
    )


def _more_of_bound(limits: Limits) -> str:
    """What else the lower bound is made of, where that raises it."""
    parts = [format_time(ns) for ns in (limits.chain_ns, limits.load_ns)]
    both, batch = format_time(limits.combined_ns), limits.bound_batch_ns
    text = ""
    if limits.combined_ns > max(limits.chain_ns, limits.load_ns) and both not in parts:
        text = f", both together {both}"
    if batch and batch >= WORTH_TELLING * limits.lower_bound_ns:
        text += f"; before them {format_time(batch)} to copy the batch"
    return text


def _batch_text(timeline: Timeline) -> str:
    """What bringing in the batch takes, as a sentence; nothing if that does not matter."""
    if timeline.batch_ns < WORTH_TELLING * timeline.makespan_ns or not timeline.batch_ns:
        return ""
    took = format_time(timeline.batch_ns)
    return f" Before the first op, the batch is copied to its devices in {took}."


def _no_gain_text(limits: Limits, usable: int, used: int, step: str) -> str:
    bound, chain = format_time(limits.lower_bound_ns), format_time(limits.chain_ns)
    if used > 1:
        took = format_time(limits.single_ns)
        first = f"this plan takes {step} on {used}, {limits.single_name} takes {took}"
    else:
        first = f"this plan runs on {limits.busiest} alone and takes {step}"
    text = (
        f"No gain from {usable} devices: {first}, and no plan can be below {bound}. The critical "
        f"path, ops that wait for one another, is at least {chain} long; {_modules(limits)}."
    )
    if limits.limited_by == "chain" and limits.chain_ns >= _BUSY * limits.lower_bound_ns:
        return f"{text} Only branches or micro-batches can overlap."
    return text


def _modules(limits: Limits, most: str = "most") -> str:
    parts = [
        f"{module or '(model)'} ({format_time(ns)})"
        for module, ns in list(limits.path_modules.items())[:3]
    ]
    return f"{most} of the path is in {', '.join(parts)}" if parts else "it is empty"
