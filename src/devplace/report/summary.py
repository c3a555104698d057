"""One plan in a few lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from devplace.graph.members import where_text
from devplace.placers import Budget, Result, Single
from devplace.placers.margin_retry import search
from devplace.placers.simple.single import all_on
from devplace.problem import Problem
from devplace.report.throughput_plan import is_for_throughput, load_rows
from devplace.simulator import Timeline, simulate
from devplace.simulator.memory_bounds import least_needs
from devplace.units import format_bytes, format_time

WORTH_TELLING = 0.01
"""Part of a step from which on the copies of the batch are told."""


def best_single(problem: Problem, known: Iterable[Timeline] = ()) -> Timeline:
    """The best step with everything on one device, as placer `single` finds it: what speed-ups are
    over. If none that it tries fits, the fastest without the memory limit.

    Args:
        problem: What is placed.
        known: Other steps; one on a single device counts if it is better.
    """
    steps = [search(problem, Single(), Budget(), seed=0).timeline]
    steps += [step for step in known if len(_in_work(step)) == 1]
    if not any(step.is_feasible for step in steps):
        steps += [simulate(problem, all_on(problem, device)) for device in problem.usable_devices]
    return min(steps, key=lambda step: (not step.is_feasible, step.makespan_ns))


def single_name(single: Timeline) -> str:
    """What a `best_single` is: where pins or kernels demand it, parts of it are elsewhere."""
    parted = len(_in_work(single)) > 1
    return "one device as far as pins and kernels allow" if parted else "one device"


def _in_work(timeline: Timeline) -> list[int]:
    return [d for d, ops in enumerate(timeline.order) if ops]


def _is_too_large(problem: Problem) -> bool:
    """Whether it is proved that no single device can hold the step, in whatever order."""
    needs = least_needs(problem)
    for d in problem.usable_devices:
        there = problem.allowed[:, d]
        static = needs.total_bytes if there.all() else int(needs.static_bytes[there].sum())
        if static <= needs.room_bytes[d] and needs.allowed[there, d].all():
            return False
    return True


def devices_in_use(timeline: Timeline) -> list[int]:
    """Indices of the devices that run an op or hold memory."""
    return [d for d, ops in enumerate(timeline.order) if ops or timeline.peak_bytes[d]]


def missing_text(missing_bytes: dict[str, int]) -> str:
    """Which device lacks how much.

    Example:
        >>> missing_text({"cuda:0": 3_000_000})
        'cuda:0 lacks 2.86 MiB'
    """
    return ", ".join(f"{name} lacks {format_bytes(n)}" for name, n in missing_bytes.items())


_STATUS_TEXT = {
    "optimal": "optimal: proved, no plan that fits is faster under these costs",
    "feasible": "feasible: it fits; a faster plan may exist",
    "infeasible": "infeasible: proved, no plan fits",
    "unknown": "unknown: it does not fit; whether any plan does is open",
}


@dataclass(frozen=True)
class Idle:
    """A device waiting for its next op.

    Attributes:
        device: Index of the device.
        start_ns, end_ns: From when to when.
        op: Index of the op it waits for, -1 when nothing is left to do.
        tensor: Id of the tensor that comes last, -1 if the op reads nothing another op makes.
        source: Index of the device that makes that tensor, -1 likewise.
        made_ns: When that tensor is made; after that it is on its way.
    """

    device: int
    start_ns: int
    end_ns: int
    op: int = -1
    tensor: int = -1
    source: int = -1
    made_ns: int = 0

    @property
    def length_ns(self) -> int:
        """How long it waits."""
        return self.end_ns - self.start_ns


def longest_idle(timeline: Timeline) -> Idle | None:
    """The longest time a device that has work runs nothing; None when no device ever waits."""
    longest: Idle | None = None
    for d, ops in enumerate(timeline.order):
        end = timeline.batch_ns
        for op in ops:
            start = int(timeline.start_ns[op])
            if start > end and (longest is None or start - end > longest.length_ns):
                longest = Idle(d, end, start, op)
            end = max(end, int(timeline.finish_ns[op]))
        left = timeline.makespan_ns - end
        if ops and left > 0 and (longest is None or left > longest.length_ns):
            longest = Idle(d, end, timeline.makespan_ns)
    return longest and _with_reason(timeline, longest)


def _with_reason(timeline: Timeline, idle: Idle) -> Idle:
    if idle.op < 0:
        return idle
    problem, tasks = timeline.problem, timeline.problem.core.tasks
    arrival = {t.tensor: t.arrival_ns for t in timeline.transfers if t.dst == idle.device}
    last = Idle(idle.device, idle.start_ns, idle.end_ns, idle.op)
    latest = -1
    task = tasks.op_task[idle.op]
    for carrier in tasks.in_carrier[tasks.in_ptr[task] : tasks.in_ptr[task + 1]]:
        tensor = int(tasks.carrier_tensor[carrier])
        maker = int(tasks.task_op[tasks.op_task[problem.graph.producer[tensor]]])
        made = int(timeline.finish_ns[maker])
        ready = arrival.get(tensor, made)
        if ready > latest:
            latest, source = ready, int(timeline.devices[maker])
            last = Idle(idle.device, idle.start_ns, idle.end_ns, idle.op, tensor, source, made)
    return last


def idle_text(timeline: Timeline, idle: Idle | None) -> str:
    """The reason of an idle time as a sentence."""
    if idle is None:
        return "none: no device ever waits"
    graph, names = timeline.problem.graph, timeline.problem.machine.device_names
    who = f"{names[idle.device]} for {format_time(idle.length_ns)}"
    if idle.op < 0:
        return f"{who}: it has nothing left to do after {format_time(idle.start_ns)}"
    before = f"before {graph.ops[idle.op].name}"
    where = where_text(graph.ops[idle.op])
    if where:
        before += f" ({where})"
    if idle.tensor < 0:
        return f"{who} {before}"
    tensor = graph.tensors[idle.tensor]
    if idle.source == idle.device:
        return f"{who} {before}: waits for {tensor.name}"
    if idle.made_ns > idle.start_ns:
        return f"{who} {before}: waits for {tensor.name}, which {names[idle.source]} still computes"
    way = format_bytes(tensor.num_bytes)
    return f"{who} {before}: waits for {tensor.name} ({way}) on its way from {names[idle.source]}"


def plan_summary(result: Result, single: Timeline | None = None) -> str:
    """Step, speed-up, bound, what every device does, what moves, and what the search cost.

    Args:
        result: What was found.
        single: Best step on one device, if already known.
    """
    timeline, problem = result.timeline, result.timeline.problem
    single = single or best_single(problem, [timeline])
    label = result.objective.label
    lines = [
        ("step", f"{format_time(result.step_ns)} predicted{_against(result.step_ns, single)}"),
        *([(label, format_time(result.value_ns))] if result.has_own_value else []),
        (
            "lower bound",
            f"{format_time(result.bound_ns)}; the {label} is {_gap_text(result.gap)}",
        ),
        ("status", _STATUS_TEXT[result.status]),
    ]
    if is_for_throughput(result):
        lines = load_rows(result, single)
    is_analytic = problem.costs.origin == "analytic"
    lines.append(("costs", "analytic: no op was timed" if is_analytic else problem.costs.origin))
    streams = problem.core.wires.streams
    for d in devices_in_use(timeline):
        whole = max(1, timeline.makespan_ns * int(streams[d]))
        text = f"busy {timeline.busy_ns[d] / whole:.0%}, memory "
        text += f"{format_bytes(int(timeline.peak_bytes[d]))} of "
        lines.append((problem.machine.device_names[d], text + format_bytes(problem.limit_bytes[d])))
    if not timeline.is_feasible:
        lines.append(("does not fit", missing_text(timeline.missing_bytes)))
    if timeline.batch_ns and timeline.batch_ns >= WORTH_TELLING * timeline.makespan_ns:
        took = format_time(timeline.batch_ns)
        lines.append(("batch", f"copied to its devices in {took}, before the first op"))
    count = len(timeline.transfers)
    lines.append(("moved", f"{format_bytes(timeline.transfer_bytes)} in {count:,} transfers"))
    if sum(map(bool, timeline.order)) > 1:
        lines.append(("longest idle", idle_text(timeline, longest_idle(timeline))))
    took = f"{result.evaluations:,} evaluations in {result.seconds:.1f} s, "
    cost = took if result.evaluations else ""  # a plan from a file does not say
    lines.append(("placer", f"{result.placer}, {cost}seed {result.seed}"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _gap_text(gap: float) -> str:
    if gap < 0:
        return f"{-gap:.1%} below it, which only plans that do not fit can be"
    if not gap:
        return "as long"
    return f"{gap:.1%} above it" if gap < 1 else f"{1 + gap:.1f}x as long"


def _against(step_ns: int, single: Timeline) -> str:
    names = single.problem.machine.device_names
    used = [names[d] for d in _in_work(single)]
    where = f"{used[0]} alone" if len(used) == 1 else single_name(single)
    if not step_ns or not single.makespan_ns:
        return ""
    if not single.is_feasible:
        lacks = missing_text(single.missing_bytes)
        if _is_too_large(single.problem):
            return f"; no single device can hold it ({lacks})"
        return f"; no order tried fits on a single device ({lacks})"
    ratio = single.makespan_ns / step_ns
    if len(used) == 1 and step_ns == single.makespan_ns:
        return f", as fast as {where}"
    return f", {ratio:.2f}x the speed of {where} ({format_time(single.makespan_ns)})"
