"""Differences between a measured step and its plan, by op kind, op, transfer and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from devplace.errors import InputError
from devplace.graph.members import calls_text, modules_of, where_text
from devplace.simulator import Timeline
from devplace.units import format_bytes, format_time

if TYPE_CHECKING:
    from devplace.run.measured_timeline import MeasuredTimeline
    from devplace.schedule import PlannedTransfer as ScheduledTransfer


@dataclass(frozen=True)
class Deviation:
    """Planned and measured time of something.

    Attributes:
        name: Op, kind of op, tensor, or what a device does.
        where: Device, or `src->dst`.
        count: How many ops or transfers it sums up.
        planned_ns, measured_ns: Time, summed over them.
        num_bytes: What a transfer carries; 0 for ops.
        modules: Of a fused group, the modules of its members.
        about: The same in words, for tables; of kinds what they call.
    """

    name: str
    where: str
    count: int
    planned_ns: int
    measured_ns: int
    num_bytes: int = 0
    modules: tuple[str, ...] = ()
    about: str = ""

    @property
    def difference_ns(self) -> int:
        """Measured less planned; positive is slower than planned."""
        return self.measured_ns - self.planned_ns

    def as_json(self, step_ns: int) -> dict[str, Any]:
        """For --json; `share` is the part of the measured step."""
        return {
            "name": self.name,
            "where": self.where,
            "count": self.count,
            "planned_ns": self.planned_ns,
            "measured_ns": self.measured_ns,
            "difference_ns": self.difference_ns,
            "share": self.difference_ns / step_ns if step_ns else 0.0,
            "bytes": self.num_bytes,
            **({"modules": list(self.modules)} if self.modules else {}),
            **({"about": self.about} if self.about else {}),
        }


@dataclass(frozen=True)
class Deviations:
    """Planned and measured times of one step, largest difference first in each list.

    Attributes:
        step: The whole step.
        devices: Per device that runs ops its `work` (ops) and its `wait` (the rest of the step:
            nothing to do, waiting for a tensor, sending).
        kinds: Per op target and device.
        ops: Per op.
        transfers: Per tensor and pair of devices, from when it is ready to when it has arrived.
        links: Per pair of devices, all its transfers.
        missing: Names of planned ops and transfers that were not measured, or measured ones that
            were not planned.
    """

    step: Deviation
    devices: tuple[Deviation, ...]
    kinds: tuple[Deviation, ...] = field(repr=False)
    ops: tuple[Deviation, ...] = field(repr=False)
    transfers: tuple[Deviation, ...] = field(repr=False)
    links: tuple[Deviation, ...] = ()
    missing: tuple[str, ...] = ()

    def as_json(self, most: int = 20) -> dict[str, Any]:
        """For --json: the `most` largest of each list."""
        step_ns = self.step.measured_ns
        lists = {
            name: [row.as_json(step_ns) for row in getattr(self, name)[:most]]
            for name in ("devices", "kinds", "ops", "transfers", "links")
        }
        return {"step": self.step.as_json(step_ns), **lists, "missing": list(self.missing)}

    def tables(self, most: int = 10) -> list[Table]:
        """Tables for a terminal, of the `most` largest of each list."""
        step_ns = self.step.measured_ns
        found = [
            _table(
                "Devices, in one step with every op timed",
                "what",
                (self.step, *self.devices),
                step_ns,
            )
        ]
        lists = [("Kinds of ops", "op", self.kinds), ("Ops", "op", self.ops)]
        lists += [("Links", "what", self.links), ("Transfers", "tensor", self.transfers)]
        for title, head, rows in lists:
            if rows:
                of = f", {most} largest of {len(rows)}" if len(rows) > most else ""
                found.append(_table(title + of, head, rows[:most], step_ns))
        return found


def deviations(
    timeline: Timeline, measured: MeasuredTimeline, transfers: Sequence[ScheduledTransfer] = ()
) -> Deviations:
    """Planned beside measured times of a step.

    Args:
        timeline: The planned step.
        measured: The same step as it was run.
        transfers: What `measured.transfer_start_ns` belongs to (`Schedule.transfers`); without it
            transfers are left out.

    Raises:
        InputError: `measured` is of another graph, or `transfers` do not belong to it.
    """
    _check(timeline, measured, transfers)
    ops, kinds = _ops(timeline, measured)
    sent, missing = _transfers(timeline, measured, transfers)
    unseen = [
        timeline.problem.graph.ops[op].name
        for row in timeline.order
        for op in row
        if measured.start_ns[op] < 0
    ]
    return Deviations(
        Deviation("step", "", 1, timeline.makespan_ns, measured.makespan_ns),
        tuple(_devices(timeline, measured)),
        _largest_first(kinds),
        _largest_first(ops),
        _largest_first(sent),
        _largest_first(_summed([("all", row.where, row) for row in sent])),
        tuple([*unseen, *missing]),
    )


def _check(
    timeline: Timeline, measured: MeasuredTimeline, transfers: Sequence[ScheduledTransfer]
) -> None:
    planned, seen = len(timeline.problem.graph.ops), len(measured.start_ns)
    if planned != seen:
        raise InputError(
            f"A measured timeline must be of the planned graph: it has {seen} ops, the plan "
            f"{planned}. Run this plan."
        )
    if transfers and len(transfers) != len(measured.transfer_start_ns):
        raise InputError(
            f"Measured transfers must be those of the schedule: {len(transfers)} scheduled, "
            f"{len(measured.transfer_start_ns)} measured. Pass `Schedule.transfers`."
        )


def _ops(timeline: Timeline, measured: MeasuredTimeline) -> tuple[list[Deviation], list[Deviation]]:
    """Per op, and per target and device."""
    graph, names = timeline.problem.graph, timeline.problem.machine.device_names
    planned = (timeline.finish_ns - timeline.start_ns).tolist()
    seen = (measured.finish_ns - measured.start_ns).tolist()
    rows, keyed = [], []
    calls: dict[str, str] = {}
    for device, order in enumerate(timeline.order):
        for op in order:
            if measured.start_ns[op] >= 0:
                one, times = graph.ops[op], (planned[op], seen[op])
                row = Deviation(one.name, names[device], 1, *times)
                keyed.append((one.target, names[device], row))
                if one.members:
                    row = replace(row, modules=modules_of(one), about=where_text(one))
                    calls[one.target] = calls_text(one)
                rows.append(row)
    return rows, [replace(row, about=calls.get(row.name, "")) for row in _summed(keyed)]


def _devices(timeline: Timeline, measured: MeasuredTimeline) -> list[Deviation]:
    """Work and waiting of every device that runs ops."""
    names = timeline.problem.machine.device_names
    spent = measured.finish_ns - measured.start_ns
    rows = []
    for device, order in enumerate(timeline.order):
        if not order:
            continue
        ran = [op for op in order if measured.start_ns[op] >= 0]
        work, did = int(timeline.busy_ns[device]), int(spent[ran].sum())
        rows.append(Deviation("work", names[device], len(order), work, did))
        wait, waited = timeline.makespan_ns - work, measured.makespan_ns - did
        rows.append(Deviation("wait", names[device], 1, wait, waited))
    return rows


def _transfers(
    timeline: Timeline, measured: MeasuredTimeline, transfers: Sequence[ScheduledTransfer]
) -> tuple[list[Deviation], list[str]]:
    """Per transfer, and the names of those that are only on one side."""
    if not transfers:
        return [], []
    problem = timeline.problem
    names, tensors = problem.machine.device_names, problem.graph.tensors
    planned = {(t.tensor, t.dst): t for t in timeline.transfers}
    times = zip(
        measured.transfer_start_ns.tolist(), measured.transfer_finish_ns.tolist(), strict=True
    )
    rows, missing = [], []
    for sent, (begin, end) in zip(transfers, times, strict=True):
        where = f"{names[sent.src]}->{names[sent.dst]}"
        plan = planned.pop((sent.tensor, sent.dst), None)
        if plan is None:
            missing.append(f"{tensors[sent.tensor].name} {where}")
            continue
        took = plan.arrival_ns - plan.request_ns
        name = tensors[sent.tensor].name
        rows.append(Deviation(name, where, 1, took, end - begin, sent.num_bytes))
    missing += [
        f"{tensors[t.tensor].name} {names[t.src]}->{names[t.dst]}" for t in planned.values()
    ]
    return rows, missing


def _summed(rows: Sequence[tuple[str, str, Deviation]]) -> list[Deviation]:
    """One row per name and place."""
    groups: defaultdict[tuple[str, str], list[Deviation]] = defaultdict(list)
    for name, where, row in rows:
        groups[name, where].append(row)
    return [
        Deviation(
            name,
            where,
            len(group),
            sum(row.planned_ns for row in group),
            sum(row.measured_ns for row in group),
            sum(row.num_bytes for row in group),
        )
        for (name, where), group in groups.items()
    ]


def _largest_first(rows: Sequence[Deviation]) -> tuple[Deviation, ...]:
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_ns)))


def _table(title: str, head: str, rows: Sequence[Deviation], step_ns: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    with_bytes = any(row.num_bytes for row in rows)
    table.add_column(head, overflow="fold")
    table.add_column("where", no_wrap=True)
    heads = ["count", "planned", "measured", "difference", "of step"]
    for name in [*heads, "size"] if with_bytes else heads:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        sign = "+" if row.difference_ns > 0 else ""
        cells: list[str | Text] = [
            Text(f"{row.name} ({row.about})" if row.about else row.name),
            Text(row.where),
            str(row.count),
            format_time(row.planned_ns),
            format_time(row.measured_ns),
            sign + format_time(row.difference_ns),
            f"{row.difference_ns / step_ns:+.1%}" if step_ns else "-",
        ]
        table.add_row(*cells, *([format_bytes(row.num_bytes)] if with_bytes else []))
    return table
