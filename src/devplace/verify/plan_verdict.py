"""A plan of a whole step, checked against its problem without the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from devplace.units import parse_size
from devplace.verify.device_demands import broken_demands, meant_device
from devplace.verify.facts import Facts, facts
from devplace.verify.replay import Replay, replay

if TYPE_CHECKING:
    from devplace.plan import Plan
    from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class StepVerdict:
    """A step, computed anew.

    Attributes:
        step_ns: Its length.
        peak_bytes: Largest memory in use per device.
        pool_peak_bytes: Largest memory in use per pool.
        broken: Rules broken, in words; empty for a valid plan.
        seen: What happened.
    """

    step_ns: int
    peak_bytes: tuple[int, ...]
    pool_peak_bytes: tuple[int, ...]
    broken: tuple[str, ...]
    seen: Replay


def verify_plan(problem: Problem, plan: Plan) -> StepVerdict:
    """Replay a plan in its own order and check every rule; `broken` also tells where the numbers
    predicted in it differ.

    Where its priorities give that very order, they are what is replayed: on a device with several
    streams an order says less. What a GPU reserves beyond what is in use (gaps, where the costs
    have them) is not replayed: there a predicted peak may be larger, never smaller.
    """
    verdict = verify_step(problem, plan.placement, plan.priority, plan.order)
    if not verdict.peak_bytes:  # it could not be replayed
        return verdict
    if any(place.streams > 1 for place in problem.machine.devices):
        by_priority = verify_step(problem, plan.placement, plan.priority)
        own: list[list[int]] = [[] for _ in plan.order]
        for v in by_priority.seen.sequence:
            own[plan.placement[v]].append(v)
        if own == [list(row) for row in plan.order]:
            verdict = by_priority
    broken = list(verdict.broken)
    if plan.predicted.step_ns != verdict.step_ns:
        broken.append(f"the plan predicts {plan.predicted.step_ns} ns, it takes {verdict.step_ns}")
    for place, peak in zip(problem.machine.devices, verdict.peak_bytes, strict=True):
        said = plan.predicted.peak_bytes.get(place.name)
        has_gaps = problem.costs.has_gaps and place.traits.fixed_addresses
        if said is None or said < peak or (said > peak and not has_gaps):
            broken.append(f"the plan predicts a peak of {said} bytes on {place.name}, it is {peak}")
    return StepVerdict(
        verdict.step_ns, verdict.peak_bytes, verdict.pool_peak_bytes, tuple(broken), verdict.seen
    )


def verify_placement(problem: Problem, placement: Placement) -> StepVerdict:
    """Replay a placement by its priorities, or in its order if it has one."""
    priority = None if placement.priority is None else placement.priority.tolist()
    return verify_step(problem, placement.devices.tolist(), priority, placement.order)


def verify_step(
    problem: Problem,
    device: Sequence[int],
    priority: Sequence[int] | None = None,
    order: Sequence[Sequence[int]] | None = None,
) -> StepVerdict:
    """Length, peaks and broken rules of a step.

    Args:
        problem: What is placed.
        device: Device of each op.
        priority, order: As `replay` has them.
    """
    broken = broken_demands(problem, device) or _unreadable(problem, device, priority, order)
    if broken:
        return StepVerdict(0, (), (), tuple(broken), Replay())
    found = facts(problem.graph)
    seen = replay(problem, device, priority, order)
    lost = [v for v in found.work if v not in seen.finish_ns]
    if lost:
        name = problem.graph.ops[lost[0]].name
        return StepVerdict(0, (), (), (f"{name!r} never runs: ops wait for each other",), seen)
    broken += _overlaps(problem, device, seen) + _too_early(problem, device, found, seen)
    peaks, pool_peaks = _peaks(problem, device, found, seen)
    broken += _overfull(problem, peaks, pool_peaks)
    return StepVerdict(seen.step_ns, peaks, pool_peaks, tuple(broken), seen)


def _unreadable(
    problem: Problem,
    device: Sequence[int],
    priority: Sequence[int] | None,
    order: Sequence[Sequence[int]] | None,
) -> list[str]:
    """Priorities that are not one per op; orders that lack an op, or have one twice or elsewhere
    than it runs."""
    ops, machine = problem.graph.ops, problem.machine
    if priority is not None and len(priority) != len(ops):
        return [f"{len(priority)} priorities are given for {len(ops)} ops"]
    if order is None:
        return []
    if len(order) != len(machine.devices):
        return [f"{len(order)} orders are given for {len(machine.devices)} devices"]
    runs = [v for v in facts(problem.graph).work if not ops[v].is_source]
    count = Counter((d, v) for d, row in enumerate(order) for v in row)
    wanted = {(device[v], v) for v in runs}
    broken = [
        f"{ops[v].name!r} is {times} times in the order of {machine.devices[d].name}, on which it "
        f"runs"
        for d, v in sorted(wanted)
        if (times := count[d, v]) != 1
    ]
    return broken + [
        f"op {v} is in the order of {machine.devices[d].name} but does not run there"
        for d, v in sorted(count.keys() - wanted)
    ]


def _overlaps(problem: Problem, device: Sequence[int], seen: Replay) -> list[str]:
    """More ops at once than a device has streams."""
    broken = []
    for d, place in enumerate(problem.machine.devices):
        spans = [(seen.start_ns[v], seen.finish_ns[v], v) for v in seen.sequence if device[v] == d]
        for begin, end, v in spans:
            at_once = sum(a <= begin < b for a, b, _ in spans if b > a)
            if end > begin and at_once > place.streams:
                name = problem.graph.ops[v].name
                broken.append(f"{name!r} is one of {at_once} ops at once on {place.name}")
    return broken


def _too_early(problem: Problem, device: Sequence[int], found: Facts, seen: Replay) -> list[str]:
    """Ops that begin before an input is there."""
    broken = []
    arrival = {(s.tensor, s.dst): s.arrival_ns for s in seen.sent}
    for v in found.work:
        for tensor in found.reads[v]:
            maker = found.owner[tensor]
            there = seen.finish_ns[maker]
            if device[maker] != device[v]:
                there = arrival[tensor, device[v]]
            if seen.start_ns[v] < there:
                name = problem.graph.ops[v].name
                broken.append(
                    f"{name!r} begins before {problem.graph.tensors[tensor].name!r} is there"
                )
    return broken


def _peaks(
    problem: Problem, device: Sequence[int], found: Facts, seen: Replay
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most memory in use per device and pool, from what lies where during which looks."""
    rounds, machine = max(1, seen.rounds), problem.machine
    change = np.zeros((len(machine.devices), rounds + 1), np.int64)

    def hold(d: int, size: int, first: int, last: int) -> None:
        if last > first:
            change[d, first] += size
            change[d, last] -= size

    for d, size, first, last in _held(problem, device, found, seen, rounds):
        hold(d, size, first, min(last, rounds))
    used = change.cumsum(axis=1)[:, :rounds]
    pools = []
    for pool in machine.pools:
        members = [d for d, place in enumerate(machine.devices) if place.pool == pool.name]
        pools.append(int(used[members].sum(axis=0).max()) if members else 0)
    return tuple(int(row.max()) for row in used), tuple(pools)


def _held(
    problem: Problem, device: Sequence[int], found: Facts, seen: Replay, rounds: int
) -> list[tuple[int, int, int, int]]:
    """Device, bytes, first look that sees it, first look that no longer does."""
    graph, costs = problem.graph, problem.costs
    size = [tensor.num_bytes for tensor in graph.tensors]
    rows = []
    for source, users in found.constants.items():
        whole = sum(size[t] for t in graph.ops[source].outputs)
        rows += [(d, whole, 0, rounds) for d in {device[v] for v in users}]
    if costs.held_bytes is not None:
        rows += [(d, int(costs.held_bytes[d]), 0, rounds) for d in {device[v] for v in found.work}]
    for v in found.work:
        first, last = seen.first_round[v], seen.last_round[v]
        extra = graph.ops[v].workspace_bytes
        if costs.workspace_bytes is not None:
            extra = int(costs.workspace_bytes[v])
        rows.append((device[v], extra, first, last))
        for tensor in found.owned[v]:
            begin = last if tensor in seen.in_place else first
            rows.append(
                (device[v], size[tensor], begin, _until(device, found, seen, tensor, rounds))
            )
    for sent in seen.sent:
        if problem.machine.devices[sent.dst].traits.fixed_addresses:
            rows.append((sent.dst, size[sent.tensor], 0, rounds))
            continue
        readers = [v for v in found.readers[sent.tensor] if device[v] == sent.dst]
        gone = max(seen.last_round[v] for v in readers)
        rows.append((sent.dst, size[sent.tensor], sent.round_, gone))
    return rows


def _until(device: Sequence[int], found: Facts, seen: Replay, owned: int, rounds: int) -> int:
    """First look that no longer sees the memory of a tensor: readers and transfers are done."""
    if owned in found.kept:
        return rounds
    maker = found.owner[owned]
    last = seen.last_round[maker]
    for tensor in found.sends[maker]:
        if found.memory_of[tensor] != owned:
            continue
        here = [v for v in found.readers[tensor] if device[v] == device[maker]]
        last = max([last, *(seen.last_round[v] for v in here)])
        last = max([last, *(s.last_round for s in seen.sent if s.tensor == tensor)])
    return last


def _overfull(problem: Problem, peaks: Sequence[int], pool_peaks: Sequence[int]) -> list[str]:
    machine = problem.machine
    limits = {place.name: place.usable_bytes for place in machine.devices}
    for name, value in problem.limits.items():
        meant = meant_device(machine, name)
        limits[meant] = min(limits[meant], parse_size(value))
    broken = [
        f"{place.name} needs {peak} bytes, more than its limit of {limits[place.name]}"
        for place, peak in zip(machine.devices, peaks, strict=True)
        if peak > limits[place.name]
    ]
    for pool, peak in zip(machine.pools, pool_peaks, strict=True):
        reserve = sum(d.reserve_bytes for d in machine.devices if d.pool == pool.name)
        if peak > max(0, pool.memory_bytes - reserve):
            broken.append(f"pool {pool.name} needs {peak} bytes, more than {pool.memory_bytes}")
    return broken
