"""Plans: placement and order, kept apart from what was predicted for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import devplace
from devplace.errors import PlanError, PlanMismatchError, ProblemError
from devplace.files import decode_json, read_whole, write_whole
from devplace.graph.serialize import fingerprint as graph_fingerprint
from devplace.machine import Device, Machine
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.units import format_bytes, format_time

FORMAT = "devplace plan"
FORMAT_VERSION = 1


class Prediction(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers predicted when the plan was made. For people; always recomputed, never trusted.

    Attributes:
        step_ns: Step time.
        peak_bytes: Device name -> largest memory in use.
        transfer_bytes: Bytes that cross links.
        num_transfers: Tensors that cross links.
        lower_bound_ns: No plan can be faster, by the same costs.
        max_load_ns: Largest load of a device in a full pipeline of steps; 0 where the plan was not
            made for one.
    """

    step_ns: int
    peak_bytes: dict[str, int]
    transfer_bytes: int
    num_transfers: int
    lower_bound_ns: int = 0
    max_load_ns: int = 0


class Fingerprints(msgspec.Struct, frozen=True):
    """What the plan was made for."""

    graph: str
    machine: str
    devplace: str
    torch: str = ""


class _PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    request: dict[str, Any]
    fingerprints: Fingerprints
    predicted: Prediction
    devices: tuple[str, ...]
    ops: tuple[str, ...]
    placement: tuple[int, ...]
    priority: tuple[int, ...]
    order: dict[str, tuple[int, ...]]


@dataclass(frozen=True, repr=False)
class Plan:
    """Device of every op, and the order of ops on every device.

    Attributes:
        ops: Op names, in graph order.
        device_names: Device names, in machine order.
        placement: Index of each op's device.
        priority: Among ready ops the larger runs first (see `Placement`).
        order: Per device, indices of the ops it runs, in order.
        predicted: What was predicted when it was made.
        fingerprints: What it was made for.
        request: How it was made: model, machine, placer, seed, limits, pins; plain JSON.
        problem: The problem it solves, while in memory.
    """

    ops: tuple[str, ...]
    device_names: tuple[str, ...]
    placement: tuple[int, ...]
    priority: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]
    predicted: Prediction
    fingerprints: Fingerprints
    request: dict[str, Any] = field(default_factory=dict)
    problem: Problem | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        used = ", ".join(self.device_names[device] for device in sorted(set(self.placement)))
        step = format_time(self.predicted.step_ns)
        return f"Plan({len(self.ops)} ops on {used}, predicted {step} per step)"

    def as_placement(self) -> Placement:
        """Placement and order as the simulator takes them.

        Raises:
            PlanError: The plan does not hang together, as one that was edited.
        """
        _check_whole(self)
        priority = np.array(self.priority, np.int64)
        return Placement(np.array(self.placement, np.int32), priority, self.order)

    def check(self, problem: Problem) -> None:
        """Refuse a problem this plan was not made for, or in whose memory it does not fit.

        Raises:
            PlanMismatchError: Says what differs, or which device lacks how much.
            PlanError: The plan breaks a demand of the problem (colocation, pins, order).
        """
        _check_graph(self, problem)
        _check_machine(self, problem.machine)
        _check_memory(self.timeline(problem))

    def timeline(self, problem: Problem | None = None) -> Timeline:
        """Simulate the plan in its order; numbers are those of the problem's costs, not the stored
        ones. Memory limits are not checked.

        Raises:
            PlanMismatchError: The problem has other ops or devices than the plan.
            PlanError: The plan breaks a demand of the problem (colocation, pins, order).
        """
        problem = problem or self.problem
        if problem is None:
            raise PlanError("A plan from a file needs a problem: capture the model and build one.")
        placement = self.as_placement()
        _check_graph(self, problem)
        check_devices(self, problem.machine)
        _check_placement(self, problem)
        try:
            timeline = simulate(problem, replace(placement, order=None))
            if timeline.order == self.order:
                return timeline
            return simulate(problem, placement)  # it was edited, or devices wait for their turns
        except ProblemError as error:
            raise PlanError(f"{error} Or make the plan again.") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; an existing file is replaced only by a whole new one.

        Raises:
            PlanError: The file cannot be written, or the plan does not hang together.
        """
        try:
            write_whole(path, self.to_json())
        except OSError as error:
            raise PlanError(
                f"Cannot write plan {path}: {error.strerror}. Check the path."
            ) from error

    def to_json(self) -> bytes:
        """The plan as JSON.

        Raises:
            PlanError: The plan does not hang together, as one that was edited.
        """
        _check_whole(self)
        data = _PlanFile(
            FORMAT,
            FORMAT_VERSION,
            self.request,
            self.fingerprints,
            self.predicted,
            self.device_names,
            self.ops,
            self.placement,
            self.priority,
            dict(zip(self.device_names, self.order, strict=True)),
        )
        return msgspec.json.encode(data) + b"\n"


def make_plan(
    timeline: Timeline,
    priority: Any,
    request: dict[str, Any],
    bound_ns: int = 0,
    max_load_ns: int = 0,
) -> Plan:
    """Plan from a simulated placement.

    Args:
        timeline: Its simulation.
        priority: Priorities it was simulated with, int64 `[V]`.
        request: How it was made.
        bound_ns: Lower bound of the problem, if known.
        max_load_ns: Largest load, of a plan made for a full pipeline.
    """
    problem = timeline.problem
    names = problem.machine.device_names
    return Plan(
        ops=tuple(op.name for op in problem.graph.ops),
        device_names=names,
        placement=tuple(int(d) for d in timeline.devices),
        priority=tuple(int(p) for p in priority),
        order=timeline.order,
        predicted=Prediction(
            timeline.makespan_ns,
            dict(zip(names, map(int, timeline.peak_bytes), strict=True)),
            timeline.transfer_bytes,
            len(timeline.transfers),
            bound_ns,
            max_load_ns,
        ),
        fingerprints=Fingerprints(
            graph_fingerprint(problem.graph),
            machine_fingerprint(problem.machine),
            devplace.__version__,
            str(problem.graph.meta.get("torch", "")),
        ),
        request=request,
        problem=problem,
    )


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        PlanError: Missing, truncated, edited so that it no longer hangs together, another format.
    """
    try:
        data = read_whole(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(
            f"Cannot read plan {path}: {reason}. Check the path; `devplace plan MODEL -o "
            "FILE` writes plans."
        ) from error
    return plan_from_json(data, str(path))


def plan_from_json(data: bytes, path: str) -> Plan:
    """As `load_plan`, of what `Plan.to_json` gave; `path` is its name in messages."""
    try:
        found = decode_json(data, _PlanFile)
    except ValueError as error:
        raise PlanError(
            f"{path} is not a whole devplace plan: {error}. Make one with `devplace plan "
            "MODEL -o FILE`."
        ) from error
    if found.format != FORMAT or found.version != FORMAT_VERSION:
        raise PlanError(
            f"{path} has format {found.format!r} version {found.version}, expected {FORMAT!r} "
            f"version {FORMAT_VERSION}. Make the plan again."
        )
    if set(found.order) != set(found.devices):
        raise PlanError(f"{path}: order must have one list per device. Make the plan again.")
    plan = Plan(
        found.ops,
        found.devices,
        found.placement,
        found.priority,
        tuple(found.order[name] for name in found.devices),
        found.predicted,
        found.fingerprints,
        found.request,
    )
    _check_whole(plan, f"{path}: ")
    return plan


def machine_fingerprint(machine: Machine) -> str:
    """Text that changes when devices, links or pools change; their order does not count, nor what
    other programs hold of a device at the moment (`reserve_bytes`)."""
    devices = sorted(map(_device_record, machine.devices))
    links = sorted(msgspec.json.encode(link, order="sorted") for link in machine.links)
    pools = sorted(msgspec.json.encode(pool, order="sorted") for pool in machine.pools)
    return hashlib.sha256(b"\n".join([*devices, *links, *pools])).hexdigest()[:16]


def _device_record(device: Device) -> bytes:
    record = msgspec.to_builtins(msgspec.structs.replace(device, reserve_bytes=0))
    if not device.host:
        del record["host"]  # as before there were several
    return msgspec.json.encode(record, order="sorted")


def _check_whole(plan: Plan, where: str = "") -> None:
    """Refuse a plan that does not hang together by itself, whatever problem it is of."""
    count, names = len(plan.ops), plan.device_names
    _check_lists(where, placement=plan.placement, priority=plan.priority, order=plan.order)
    for row in plan.order:
        _check_lists(where, order=row)
    for name, value in (("placement", plan.placement), ("priority", plan.priority)):
        if len(value) != count:
            raise PlanError(
                f"{where}{name} must have one entry per op: {len(value)} for {count} ops. "
                f"Make the plan again."
            )
    wide = next((p for p in plan.priority if not _is_whole(p) or not -(2**63) <= p < 2**63), None)
    if wide is not None:
        raise PlanError(f"{where}priority {wide} is no integer of 64 bits. Make the plan again.")
    for op, device in zip(plan.ops, plan.placement, strict=True):
        if not _is_whole(device) or not 0 <= device < len(names):
            raise PlanError(
                f"{where}{op!r} is on device {device}, but there are only "
                f"{len(names)} devices, 0 to {len(names) - 1}. Make the plan again."
            )
    if len(plan.order) != len(names) or len(set(names)) != len(names):
        raise PlanError(
            f"{where}order must have one list per device: {len(plan.order)} lists, devices "
            f"{', '.join(names)}. Make the plan again."
        )
    for index, name in enumerate(names):
        for op_index in plan.order[index]:
            is_op = _is_whole(op_index) and 0 <= op_index < count
            if not is_op or plan.placement[op_index] != index:
                raise PlanError(
                    f"{where}order of {name} lists op {op_index}, which is not placed there. "
                    f"Make the plan again."
                )


def _check_lists(where: str, **lists: Any) -> None:
    for name, found in lists.items():
        if not hasattr(found, "__len__"):
            raise PlanError(f"{where}{name} must be a list, got {found!r}. Make the plan again.")


def _is_whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _check_graph(plan: Plan, problem: Problem) -> None:
    graph = problem.graph
    if plan.fingerprints.graph == graph_fingerprint(graph) and len(plan.ops) == len(graph.ops):
        names = tuple(op.name for op in graph.ops)
        if names == plan.ops:
            return
    if len(plan.ops) != len(graph.ops):
        difference = f"it has {len(plan.ops)} ops, this model {len(graph.ops)}"
    else:
        pairs = zip(plan.ops, graph.ops, strict=True)
        name = next((op.name for known, op in pairs if known != op.name), None)
        difference = f"op {name!r} differs" if name else "shapes, dtypes or edges differ"
    torch = str(graph.meta.get("torch", ""))
    if torch != plan.fingerprints.torch:
        difference += f" (made with torch {plan.fingerprints.torch}, this is {torch})"
    raise PlanMismatchError(
        f"The plan was made for another model or batch: {difference}. Plan again."
    )


def check_devices(plan: Plan, machine: Machine) -> None:
    """Refuse a machine with other devices than the plan's.

    Raises:
        PlanMismatchError: Lists both.
    """
    if plan.device_names != machine.device_names:
        raise PlanMismatchError(
            f"The plan was made for another machine: its devices are "
            f"{', '.join(plan.device_names)}, these are "
            f"{', '.join(machine.device_names)}. Plan again."
        )


def _check_machine(plan: Plan, machine: Machine) -> None:
    check_devices(plan, machine)
    if plan.fingerprints.machine != machine_fingerprint(machine):
        raise PlanMismatchError(
            f"The plan was made for another machine: {machine.name!r} has the same device names, "
            f"but other memory, rates or links. Plan again."
        )


def _check_placement(plan: Plan, problem: Problem) -> None:
    broken = problem.violations(plan.as_placement())
    if not broken:
        expected = problem.spaces.op_devices(problem.task_devices(plan.as_placement()))
        owned = problem.core.tasks.op_task >= 0  # copies of read-only sources are anywhere
        apart = np.flatnonzero((expected != np.array(plan.placement)) & owned)
        broken = (
            [f"{plan.ops[apart[0]]!r} must sit with what it is a view of"] if len(apart) else []
        )
    if broken:
        raise PlanError(f"The plan breaks a rule: {broken[0]}. Plan again, or undo the edit.")


def _check_memory(timeline: Timeline) -> None:
    """Refuse a step that does not fit, as where less memory is free than when it was planned."""
    if timeline.is_feasible:
        return
    machine, wires = timeline.problem.machine, timeline.problem.core.wires
    names = [*machine.device_names, *(pool.name for pool in machine.pools)]
    peaks = [*timeline.peak_bytes.tolist(), *timeline.pool_peak_bytes.tolist()]
    limits = [*wires.limit_bytes.tolist(), *wires.pool_limit_bytes.tolist()]
    lacks = "; ".join(
        f"{name} must hold {format_bytes(peak)} ({peak} bytes) and has {format_bytes(limit)} "
        f"({limit} bytes) for it"
        for name, peak, limit in zip(names, peaks, limits, strict=True)
        if peak > limit
    )
    raise PlanMismatchError(
        f"The plan does not fit into the memory that is free: {lacks}. Free memory or raise the "
        f"limit, or plan again."
    )
