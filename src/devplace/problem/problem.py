"""A placement problem: graph, machine, costs and what the user demands. Immutable, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from devplace.cost import CostTable
from devplace.errors import ProblemError
from devplace.graph import OpGraph, require_graph
from devplace.graph.coarsen import side_owner
from devplace.graph.graph import BATCH_ON
from devplace.machine import Machine, require_machine
from devplace.problem.core import Core, build_tasks, build_wires
from devplace.problem.demands import Demands, demands_of
from devplace.problem.device_names import require_mapping, resolve_device, without_memory
from devplace.problem.index_spaces import IndexSpaces
from devplace.problem.placement import Placement
from devplace.units import NS_PER_S, format_bytes, parse_size


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """Graph + machine + costs + limits, pins and excluded devices.

    Attributes:
        graph: What is computed.
        machine: Where it may run.
        costs: Time of each op on each device.
        limits: Device name -> most bytes a step may use there (integer, or text such as `20GiB`).
            Counted are parameters, optimizer state, activations, temporaries, inputs and receive
            buffers; the device's own reserve is outside. The smaller of this and the device's
            usable memory holds.
        pins: Pattern -> device name. A pattern matches the module path (or a path above it), or
            the op's name; `*` and `?` are wildcards. The first pattern that matches counts. What
            reads a module's weights goes where that is pinned, also where it is called from
            elsewhere, unless a pin names it itself.
        exclude: Names of devices that must not be used; a limit of 0 says the same.
        soft_pins: Drop pins that cannot hold (no kernel there) instead of refusing; each dropped
            one is told in `notes`.
        homes: Source op -> device name: where another plan has its parameters, buffers and
            optimizer state, which then stay there as far as other demands let them.

    Raises:
        ProblemError: Unknown device, unreadable limit, a pin that matches nothing, contradicts
            another or cuts a fused group (see `graph.fusion.fuse_for`), an op that no device can
            run.
    """

    graph: OpGraph
    machine: Machine
    costs: CostTable
    limits: Mapping[str, int | str] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    soft_pins: bool = False
    homes: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"Problem({self.graph.name!r} with {len(self.graph.ops)} ops on {self.machine.name!r}, "
            f"{self.costs.origin} costs)"
        )

    def __post_init__(self) -> None:
        for name, value in (("limits", self.limits), ("pins", self.pins)):
            require_mapping(name, value)
        require_graph(self.graph)
        require_machine(self.machine)
        if not isinstance(self.costs, CostTable):
            got = type(self.costs).__name__
            raise ProblemError(
                f"Costs must be a CostTable, got {got}. Price the graph: dp.Analytic()(graph, "
                "machine)."
            )
        shape = (len(self.graph.ops), len(self.machine.devices))
        if self.costs.compute_ns.shape != shape:
            raise ProblemError(
                f"Costs must have one row per op and one column per device: got shape "
                f"{self.costs.compute_ns.shape}, expected {shape}. Price this graph "
                f"on this machine."
            )
        if self.costs.compute_ns.dtype != np.int64:
            raise ProblemError(
                f"Costs must be int64 nanoseconds, got {self.costs.compute_ns.dtype}. Round them."
            )
        if isinstance(self.exclude, str):
            raise ProblemError(f"exclude must be a list of device names, got {self.exclude!r}.")
        if (self.costs.compute_ns < 0).any():
            op, device = map(int, np.argwhere(self.costs.compute_ns < 0)[0])
            raise ProblemError(
                f"Costs must not be negative: {self.graph.ops[op].name!r} has "
                f"{self.costs.compute_ns[op, device]} ns on {self.machine.device_names[device]}."
            )
        self._check_bytes_of_costs()
        self._check_times()
        self._check_sizes()
        _ = self.core, self.allowed  # every demand is checked here, not later

    def _check_bytes_of_costs(self) -> None:
        expected = {"workspace_bytes": len(self.graph.ops), "held_bytes": len(self.machine.devices)}
        for name, count in expected.items():
            found = getattr(self.costs, name)
            if found is None:
                continue
            if found.shape != (count,) or found.dtype != np.int64 or (found < 0).any():
                raise ProblemError(
                    f"{name} of costs must be {count} int64 byte counts of at least 0, got "
                    f"{found.dtype} of shape {found.shape}. Price this graph on this machine."
                )

    def _check_times(self) -> None:
        """One thing after the other, everything sent everywhere: even that must fit 64 bits."""
        wires, transfers = self.core.wires, self.core.transfers
        each = transfers.dearest_ns + float(transfers.latency_ns.max())
        total = wires.duration_ns.max(axis=1).sum(dtype=float)
        total += each.sum(dtype=float) * (len(wires.streams) - 1)
        total += transfers.copy_ns.sum(dtype=float)
        if total >= 2**62:
            raise ProblemError(
                f"The times of a step must fit 64 bits: these add up to {total / NS_PER_S:.2g} s. "
                f"Check the rates, bandwidths and latencies of machine {self.machine.name!r}."
            )

    def _check_sizes(self) -> None:
        """Everything kept, a copy of everything everywhere: even that must fit 64 bits."""
        tasks, count = self.core.tasks, len(self.machine.devices)
        copies = tasks.carrier_bytes.sum(dtype=float) + tasks.const_bytes.sum(dtype=float)
        once = tasks.storage_bytes.sum(dtype=float) + tasks.workspace_bytes.sum(dtype=float)
        held = self.core.wires.held_bytes.sum(dtype=float)
        total = once + copies * count + held
        if total >= 2**62:
            raise ProblemError(
                f"The sizes of a step must fit 64 bits: these add up to {total:.2g} bytes. "
                f"Check the tensors of graph {self.graph.name!r}."
            )

    @cached_property
    def limit_bytes(self) -> tuple[int, ...]:
        """Most bytes a step may use on each device."""
        limit = [device.usable_bytes for device in self.machine.devices]
        for name, value in self.limits.items():
            index = self.machine.device_index[resolve_device(self.machine, name, "limits")]
            limit[index] = min(limit[index], parse_size(value, f"Limit of {name}"))
        return tuple(limit)

    @cached_property
    def is_side(self) -> NDArray[np.bool_]:
        """Whether only the update of one parameter needs an op (`graph.coarsen`). bool `[V]`"""
        return np.array([owner is not None for owner in side_owner(self.graph)], bool)

    @cached_property
    def core(self) -> Core:
        """Tasks and wires for the simulator."""
        tasks = build_tasks(self.graph, self.costs.workspace_bytes)
        batch_on = str(self.graph.meta.get(BATCH_ON, ""))
        wires = build_wires(tasks, self.machine, self.costs, self.limit_bytes, batch_on)
        return Core(tasks, wires)

    @cached_property
    def usable_devices(self) -> tuple[int, ...]:
        """Indices of the devices that may be used."""
        names = self.machine.device_names
        return tuple(i for i, name in enumerate(names) if name not in self.unused)

    @property
    def accelerators(self) -> list[int]:
        """Usable devices that are not the host's; all usable ones where there are only those."""
        devices = self.machine.devices
        fast = [d for d in self.usable_devices if not devices[d].traits.is_host]
        return fast or list(self.usable_devices)

    @cached_property
    def unused(self) -> Mapping[str, str]:
        """Devices that must not be used -> `is excluded` or `has a limit of 0`.

        Where that is all that are not excluded, they stay, and nothing fits.
        """
        names = self.machine.device_names
        found = {
            resolve_device(self.machine, name, "exclude"): "is excluded" for name in self.exclude
        }
        if len(found) == len(names):
            raise ProblemError("At least one device must be left: exclude names all of them.")
        empty = without_memory(self.machine, self.limits)
        if not all(name in found or name in empty for name in names):
            found = {**dict.fromkeys(empty, "has a limit of 0"), **found}
        return found

    @cached_property
    def _demands(self) -> Demands:
        return demands_of(self)

    @property
    def pinned_groups(self) -> frozenset[int]:
        """Colocation groups that a pin or a home keeps where they are."""
        return self._demands.pinned

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Devices each colocation group may go to. bool, shape `[G, D]`."""
        return self._demands.allowed

    @property
    def notes(self) -> tuple[str, ...]:
        """What was softened or is worth knowing about the demands, and about the costs."""
        return (*self._demands.notes, *self._vain_limits(), *self.costs.notes)

    def _vain_limits(self) -> Iterator[str]:
        """Limits above what a device has, which lower nothing."""
        for name, value in self.limits.items():
            device = resolve_device(self.machine, name, "limits")
            asked = parse_size(value, f"Limit of {name}")
            usable = self.machine.devices[self.machine.device_index[device]].usable_bytes
            if asked > usable:
                yield (
                    f"the limit of {format_bytes(asked)} for {device} is above the "
                    f"{format_bytes(usable)} that it has for a step; the smaller one holds"
                )

    @cached_property
    def spaces(self) -> IndexSpaces:
        """Converts between ops, tasks and colocation groups."""
        return IndexSpaces(self.core.tasks, len(self.graph.ops), self.usable_devices[0])

    def task_devices(self, placement: Placement) -> NDArray[np.int32]:
        """Device of every task, int32 `[N]`."""
        devices = np.asarray(placement.devices)
        count = len(self.graph.ops)
        if devices.shape != (count,):
            raise ProblemError(
                f"A placement needs {count} devices, one per op, got shape {devices.shape}."
            )
        if devices.dtype.kind not in "iu":
            raise ProblemError(
                f"A placement has a whole number per op, the index of its device, got "
                f"{devices.dtype}."
            )
        if devices.min() < 0 or devices.max() >= len(self.machine.devices):
            raise ProblemError(
                f"A placement has device indices 0 to {len(self.machine.devices) - 1}, "
                f"got {devices.min()} to {devices.max()}."
            )
        return self.spaces.tasks_from_ops(devices).astype(np.int32)

    def task_priority(self, priority: NDArray[np.int64]) -> NDArray[np.int64]:
        """Priority of every task, int64 `[N]`, from that of every op.

        Raises:
            ProblemError: Not one integer per op.
        """
        given, count = np.asarray(priority), len(self.graph.ops)
        is_whole = given.dtype.kind in "iu" and given.dtype != np.uint64
        if given.shape != (count,) or not is_whole:
            raise ProblemError(
                f"Priorities must be {count} integers, one per op, got shape "
                f"{given.shape} of {given.dtype}. Give int64."
            )
        return self.spaces.tasks_from_ops(given).astype(np.int64)

    def violations(self, placement: Placement) -> list[str]:
        """Which demands a placement breaks: colocation, pins, unsupported ops, excluded devices."""
        tasks, devices = self.core.tasks, self.task_devices(placement)
        first = self.spaces.groups_from_tasks(devices)
        apart = devices != self.spaces.tasks_from_groups(first)
        banned = ~self.allowed[tasks.group, devices]
        found = []
        for task in np.flatnonzero(apart | banned):
            name = self.graph.ops[tasks.task_op[task]].name
            if apart[task]:
                found.append(f"{name!r} must sit with its colocation group")
            if banned[task]:
                found.append(f"{name!r} may not go to {self.machine.device_names[devices[task]]}")
        return found
