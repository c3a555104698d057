"""Select the native simulator, or the plain Python one if it is not built."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Core
from devplace.simulator.reference import CoreTimeline, critical_path_priority, simulate_core

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
_log = logging.getLogger("devplace")
_told = False
_NONE: I64 = np.zeros(0, np.int64)


class Scores:
    """What a search needs to know of many placements.

    Attributes:
        makespan_ns: `[B]`
        peak_bytes: `[B, D]`; zero when memory was not tracked.
        pool_peak_bytes: `[B, P]`
        transfer_bytes: Bytes that cross links. `[B]`
    """

    def __init__(self, makespan_ns: I64, peak_bytes: I64, pool_peak_bytes: I64, moved: I64) -> None:
        self.makespan_ns = makespan_ns
        self.peak_bytes = peak_bytes
        self.pool_peak_bytes = pool_peak_bytes
        self.transfer_bytes = moved


class SimulatorKernel(Protocol):
    """A simulator bound to one problem's arrays."""

    def priority(self, device: I32) -> I64:
        """Critical-path priority of each task. `[N]`"""
        ...

    def trace(self, device: I32, priority: I64, turn: I64 | None = None) -> CoreTimeline:
        """Simulate one placement in full; see `simulate_core`."""
        ...

    def evaluate(
        self,
        devices: I32,
        priorities: I64 | None,
        track_memory: bool = True,
        threads: int = 1,
        in_turn: bool = False,
    ) -> Scores:
        """Simulate many placements. devices `[B, N]`; priorities `[B, N]`, `[N]` or None, which
        are turns as well if `in_turn`."""
        ...


def native_module() -> Any:
    """The compiled module, or None. `DEVPLACE_NATIVE=0` switches it off."""
    if os.environ.get("DEVPLACE_NATIVE", "1").strip().lower() in ("0", "false", "off", "no"):
        return None
    try:
        from devplace.simulator import _native  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _native


def make_kernel(core: Core) -> SimulatorKernel:
    """The fastest simulator at hand for these arrays."""
    global _told
    native = native_module()
    if native is not None:
        return NativeKernel(native, core)
    if not _told:
        _told = True
        _log.warning("native simulator not built: using the plain Python one, about 200x slower")
    return ReferenceKernel(core)


class ReferenceKernel:
    """The plain Python simulator."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def priority(self, device: I32) -> I64:
        """See `SimulatorKernel`."""
        return critical_path_priority(self._core, device)

    def trace(self, device: I32, priority: I64, turn: I64 | None = None) -> CoreTimeline:
        """See `SimulatorKernel`."""
        return simulate_core(self._core, device, priority, turn)

    def evaluate(
        self,
        devices: I32,
        priorities: I64 | None,
        track_memory: bool = True,
        threads: int = 1,
        in_turn: bool = False,
    ) -> Scores:
        """See `SimulatorKernel`; `track_memory` and `threads` change nothing here."""
        rows = np.atleast_2d(devices)
        results = []
        for index, device in enumerate(rows):
            if priorities is None:
                priority = self.priority(device)
            else:
                priority = priorities[index] if priorities.ndim == 2 else priorities
            results.append(self.trace(device, priority, priority if in_turn else None))
        carrier_bytes = self._core.tasks.carrier_bytes
        return Scores(
            np.array([r.makespan_ns for r in results], np.int64),
            np.array([r.peak_bytes for r in results], np.int64).reshape(len(rows), -1),
            np.array([r.pool_peak_bytes for r in results], np.int64).reshape(len(rows), -1),
            np.array([carrier_bytes[r.transfers[:, 0]].sum() for r in results], np.int64),
        )


class NativeKernel:
    """The compiled simulator; releases the GIL while it runs."""

    def __init__(self, native: Any, core: Core) -> None:
        self._kernel = native.Kernel(core.tasks, core.wires)
        self._shape = (core.num_devices, len(core.wires.pool_limit_bytes))

    def priority(self, device: I32) -> I64:
        """See `SimulatorKernel`."""
        return cast(I64, self._kernel.priority(np.ascontiguousarray(device, np.int32)))

    def trace(self, device: I32, priority: I64, turn: I64 | None = None) -> CoreTimeline:
        """See `SimulatorKernel`."""
        return CoreTimeline(
            *self._kernel.trace(
                np.ascontiguousarray(device, np.int32),
                np.ascontiguousarray(priority, np.int64),
                _NONE if turn is None else np.ascontiguousarray(turn, np.int64),
            )
        )

    def evaluate(
        self,
        devices: I32,
        priorities: I64 | None,
        track_memory: bool = True,
        threads: int = 1,
        in_turn: bool = False,
    ) -> Scores:
        """See `SimulatorKernel`."""
        rows = np.ascontiguousarray(np.atleast_2d(devices), np.int32)
        given = _NONE if priorities is None else priorities
        makespan, peak, pool_peak, moved = self._kernel.evaluate(
            rows, np.ascontiguousarray(given, np.int64), in_turn, track_memory, threads
        )
        count, (num_devices, num_pools) = len(rows), self._shape
        return Scores(
            makespan,
            peak.reshape(count, num_devices),
            pool_peak.reshape(count, num_pools),
            moved,
        )

    def moves(
        self, device: I32, moves: Sequence[tuple[I32, I32]], cutoff_ns: I64
    ) -> tuple[I64, int]:
        """Step times after moves, each from the same placement, in its critical-path order.

        Args:
            device: The placement. int32 `[N]`
            moves: Tasks that move, and where each goes.
            cutoff_ns: Step time above which a move is given up, per move.

        Returns:
            Step times, the largest integer for moves given up; and tasks simulated over all.

        Raises:
            ValueError: A task or a device out of range.
        """
        sizes = [len(tasks) for tasks, _ in moves]
        tasks = np.concatenate([tasks for tasks, _ in moves]).astype(np.int32)
        targets = np.concatenate([target for _, target in moves]).astype(np.int32)
        found, events = self._kernel.moves(
            np.ascontiguousarray(device, np.int32),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            tasks,
            targets,
            np.ascontiguousarray(cutoff_ns, np.int64),
        )
        return found, int(events)

    def anneal(
        self,
        space: Any,
        settings: Any,
        starts: I32,
        priorities: I64 | None,
        in_turn: NDArray[np.uint8],
        seeds: I64,
        threads: int,
    ) -> tuple[I32, I64, I64, I64, I64, I64, bool]:
        """Anneal from every start, a chain each.

        Ctrl-C ends the chains where they are.

        Args:
            space: See `placers.annealing.MoveSpace`.
            settings: See `placers.annealing.CoolingSchedule`.
            starts: Device of each group. int32 `[K, G]`
            priorities: Of the tasks of each start, or None for critical-path ones. int64 `[K, N]`
            in_turn: Whether the devices of each start keep to these, and wait. uint8 `[K]`
            seeds: Of each chain. int64 `[K]`
            threads: Chains at once.

        Returns:
            Of each chain's best placement: devices of groups `[K, G]`, priorities `[K, N]`, whether
            devices keep to these, step time, bytes over the limits; simulations made `[K]`; and
            whether it was interrupted.
        """
        given = _NONE if priorities is None else priorities
        groups, priority, *found, interrupted = self._kernel.anneal(
            space,
            settings,
            np.ascontiguousarray(starts, np.int32),
            np.ascontiguousarray(given, np.int64),
            np.ascontiguousarray(in_turn, np.uint8),
            np.ascontiguousarray(seeds, np.int64),
            threads,
        )
        count = len(seeds)
        waits, step, overflow, made = found
        rows = groups.reshape(count, -1), priority.reshape(count, -1)
        return *rows, waits, step, overflow, made, bool(interrupted)
