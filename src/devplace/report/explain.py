"""Explain a plan: a row for each module, what limits the step, what runs on slow devices."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import msgspec
import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from devplace.graph.members import module_shares, modules_of, parts_of, readers_in
from devplace.report.fallback import Fallback, fallbacks
from devplace.report.limits import Limits, find_limits, limits_text
from devplace.simulator import Timeline
from devplace.simulator.bounds import LowerBound, Status, lower_bound
from devplace.units import format_bytes, format_time

FORMAT = "devplace explanation"
FORMAT_VERSION = 1
Why = Literal[
    "pinned", "no kernel elsewhere", "memory", "one device", "critical path", "spread",
    "with its parameter", "with its input", "load",
]  # fmt: skip
"""Why a module is where it is, the first that holds:

- `pinned`: a pin keeps it there.
- `no kernel elsewhere`: no other usable device may run it.
- `memory`: its parameters fit on no other device any more.
- `one device`: the whole step is on one device.
- `critical path`: at least half its time is on the critical path.
- `spread`: its ops are on several devices.
- `with its parameter`: it is where its parameters are.
- `with its input`: it receives nothing from other devices.
- `load`: to share the work.
"""


class ModuleRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One module.

    Attributes:
        module: Dotted path; `""` is the model itself.
        ops: Number of its ops, members of fused groups among them (no views, no sources).
        devices: Device -> time of its ops there, ns; most first. The time of a fused group is
            shared among the modules of its members (see `graph.members.module_shares`).
        time_ns: Time of all its ops.
        critical_ns: Time of its ops on the critical path.
        critical_share: The same as a share of the step.
        received_bytes: Bytes that reach its ops from other devices.
        why: Why it is there (see `Why`).
    """

    module: str
    ops: int
    devices: dict[str, int]
    time_ns: int
    critical_ns: int
    critical_share: float
    received_bytes: int
    why: Why


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An explanation; also its JSON form, in which every field is always there.

    Attributes:
        format, version: Of the JSON form.
        model, machine: Names.
        step_ns: Predicted step time.
        lower_bound_ns: No plan can be faster.
        gap: step / lower bound - 1.
        status: `optimal`, `feasible`, `infeasible` or `unknown` (`LowerBound.status`).
        limits: What the step's time is made of.
        text: What limits the step, in words.
        parameter_bytes: Bytes of parameters, buffers and optimizer state that cross links every
            step.
        warnings: Ops on a slower device than they need to be.
        modules: One row per module, in the order of the model.
    """

    format: str
    version: int
    model: str
    machine: str
    step_ns: int
    lower_bound_ns: int
    gap: float
    status: Status
    limits: Limits
    text: str
    parameter_bytes: int
    warnings: tuple[Fallback, ...]
    modules: tuple[ModuleRow, ...]

    def to_json(self) -> bytes:
        """The explanation as JSON."""
        return msgspec.json.encode(self)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    def lines(self) -> list[str]:
        """The text, then one line per warning; what shares the work is told, without warning."""
        kinds = ("note" if warning.is_normal else "warning" for warning in self.warnings)
        rows = zip(kinds, self.warnings, strict=True)
        return [self.text, *(f"{kind}: {warning.text}" for kind, warning in rows)]

    def table(self) -> Table:
        """One line per module."""
        table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("module", overflow="fold")
        table.add_column("device", overflow="fold")
        for name in ("time", "critical", "received"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("why", overflow="fold")
        for row in self.modules:
            table.add_row(
                Text(row.module or "(model)"),
                Text(" ".join(row.devices)),
                format_time(row.time_ns),
                f"{row.critical_share:.1%}",
                format_bytes(row.received_bytes),
                row.why,
            )
        return table


def explain(timeline: Timeline, bound: LowerBound | None = None) -> Explanation:
    """Explain a simulated step.

    Args:
        timeline: The step.
        bound: Lower bounds, if already known.

    Complexity: O(V + E), 0.3 s for 16,000 ops, most of it for the bounds.
    """
    problem = timeline.problem
    bound = bound or lower_bound(problem)
    limits = find_limits(timeline, bound)
    crossing = parameter_bytes(timeline)
    text = f"{limits_text(timeline, limits)} {_status_text(timeline, bound)}"
    if crossing:
        text += f" {format_bytes(crossing)} of parameters cross links every step."
    return Explanation(
        format=FORMAT,
        version=FORMAT_VERSION,
        model=problem.graph.name,
        machine=problem.machine.name,
        step_ns=timeline.makespan_ns,
        lower_bound_ns=limits.lower_bound_ns,
        gap=bound.gap(timeline.makespan_ns),
        status=bound.status(timeline.makespan_ns, timeline.is_feasible),
        limits=limits,
        text=text,
        parameter_bytes=crossing,
        warnings=fallbacks(timeline, limits.single_ns),
        modules=module_rows(timeline),
    )


def _status_text(timeline: Timeline, bound: LowerBound) -> str:
    status = bound.status(timeline.makespan_ns, timeline.is_feasible)
    gap = bound.gap(timeline.makespan_ns)
    return {
        "optimal": "Status: optimal (proved: the step meets the lower bound).",
        "feasible": f"Status: feasible, {gap:.1%} above the lower bound.",
        "infeasible": "Status: infeasible (proved: no plan fits).",
        "unknown": "Status: unknown: this plan does not fit; whether any does is open.",
    }[status]


def parameter_bytes(timeline: Timeline) -> int:
    """Bytes of parameters, buffers and optimizer state that cross links in every step."""
    graph, tasks = timeline.problem.graph, timeline.problem.core.tasks
    total = 0
    for transfer in timeline.transfers:
        owner = tasks.op_task[graph.producer[transfer.tensor]]
        if graph.ops[tasks.task_op[owner]].role in ("parameter", "buffer", "state"):
            total += graph.tensors[transfer.tensor].num_bytes
    return total


def module_rows(timeline: Timeline) -> tuple[ModuleRow, ...]:
    """One row per module that has ops."""
    graph, names = timeline.problem.graph, timeline.problem.machine.device_names
    spent = (timeline.finish_ns - timeline.start_ns).tolist()
    devices = timeline.devices.tolist()
    critical = set(timeline.critical_path())
    received = _received_bytes(timeline)
    per_device: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    on_path: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    for index, op in enumerate(graph.ops):
        if op.is_source:
            continue
        for module, ns in module_shares(op, spent[index]).items():
            per_device[module][names[devices[index]]] += ns
            if index in critical:
                on_path[module] += ns
        for part in parts_of(op):
            count[part.module] += not part.is_view
    reasons = _Reasons(timeline)
    rows = []
    for module, times in per_device.items():
        ordered = dict(sorted(times.items(), key=lambda item: -item[1]))
        used = {d: ns for d, ns in ordered.items() if ns} or dict([next(iter(ordered.items()))])
        total, path = sum(used.values()), on_path[module]
        share = path / timeline.makespan_ns if timeline.makespan_ns else 0.0
        got = received.get(module, 0)
        why = reasons.why(module, list(used), total, path, got)
        rows.append(ModuleRow(module, count[module], used, total, path, share, got, why))
    return tuple(rows)


def _received_bytes(timeline: Timeline) -> dict[str, int]:
    """Bytes per module; a tensor counts for the first of its readers on the device."""
    graph, tasks = timeline.problem.graph, timeline.problem.core.tasks
    device = timeline.task_devices
    start = timeline.run.start_ns
    received: dict[str, int] = defaultdict(int)
    for transfer in timeline.transfers:
        x = tasks.carrier_of[transfer.tensor]
        readers = tasks.cons[tasks.cons_ptr[x] : tasks.cons_ptr[x + 1]]
        readers = readers[device[readers] == transfer.dst]
        first = readers[np.argmin(start[readers])]
        reader = readers_in(graph, graph.ops[tasks.task_op[first]], transfer.tensor)[0]
        received[reader.module] += int(tasks.carrier_bytes[x])
    return received


class _Reasons:
    """Looks up what decides where a module is."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        problem, tasks = timeline.problem, timeline.problem.core.tasks
        self._names = problem.machine.device_names
        self._one_device = sum(map(bool, timeline.order)) <= 1
        self._groups: dict[str, set[int]] = defaultdict(set)
        self._static: dict[str, int] = defaultdict(int)
        self._homes: dict[str, set[str]] = defaultdict(set)
        self._pinned: set[str] = set()
        for op_index, group in zip(tasks.task_op.tolist(), tasks.group.tolist(), strict=True):
            op = problem.graph.ops[op_index]
            for module in modules_of(op):
                self._groups[module].add(group)
            if op.role in ("parameter", "buffer", "state"):
                sizes = (problem.graph.tensors[t].num_bytes for t in op.outputs)
                self._static[op.module] += sum(sizes)
                self._homes[op.module].add(self._names[timeline.devices[op_index]])
            if group in problem.pinned_groups:
                self._pinned.update(modules_of(op))

    def why(self, module: str, devices: list[str], total: int, path: int, received: int) -> Why:
        """The first reason that holds (see `Why`)."""
        if module in self._pinned:
            return "pinned"
        allowed = self._timeline.problem.allowed[sorted(self._groups[module])]
        others = [d for d, name in enumerate(self._names) if name not in devices]
        usable = [d for d in others if d in self._timeline.problem.usable_devices]
        if usable and len(allowed) and not allowed[:, usable].any():
            return "no kernel elsewhere"
        if usable and self._static[module] and not any(self._has_room(module, d) for d in usable):
            return "memory"
        if self._one_device:
            return "one device"
        if total and 2 * path >= total:
            return "critical path"
        if len(devices) > 1:
            return "spread"
        if set(devices) == self._homes[module]:
            return "with its parameter"
        return "load" if received else "with its input"

    def _has_room(self, module: str, device: int) -> bool:
        peak = int(self._timeline.peak_bytes[device])
        return peak + self._static[module] <= self._timeline.problem.limit_bytes[device]
