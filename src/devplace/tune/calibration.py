"""Machine constants that only whole steps reveal, fitted to measured steps.

A probe times a transfer alone. In a step it also delays ops that run meanwhile (memory and
multiprocessors are shared), is itself slower than alone, and the fork and join it brings into a
CUDA graph cost more the larger the graph is. These are priced by five numbers for all links between
GPUs: `Link.send_overhead_ns`, `receive_overhead_ns`, `send_share`, `receive_share`, and a factor on
the measured times of large transfers. Likewise an op is timed in a chain of its like; in a step it
takes longer by the kernel gap, the sixth number, which steps on one GPU show as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from devplace.cost import CostTable
from devplace.cost.profiled import KERNEL_GAP_NS
from devplace.errors import InputError
from devplace.graph import OpGraph
from devplace.machine import Link, Machine
from devplace.problem import Placement, Problem
from devplace.simulator.in_order import simulate_in_order

F64 = NDArray[np.float64]
ROUNDS = 60
SPREAD = 0.4
GAP_EVERY = 5
"""Every so many rounds the kernel gap alone is fitted."""
MIN_STEPS = 4
# Largest changes from the constants a fit starts with; with few steps it could go anywhere.
MAX_CHANGE = 4.0
KERNEL_GAP = "kernel_gap_ns"
LINK_CONSTANTS = (
    "send_overhead_ns",
    "receive_overhead_ns",
    "send_share",
    "receive_share",
    "engine_factor",
)
CONSTANTS = (KERNEL_GAP, *LINK_CONSTANTS)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What ops and transfers on GPUs cost inside a step beside what a profile and a probe show.

    Attributes:
        send_overhead_ns: Time a transfer takes of the sender's ops, ns.
        receive_overhead_ns: Time it takes of the receiver's ops, ns.
        send_share: Part of its duration by which it delays the sender's ops besides.
        receive_share: Likewise of the receiver's ops.
        engine_factor: Duration of a large transfer in a step / alone.
        kernel_gap_ns: Time by which an op on a GPU takes longer in a step than in a chain, ns.
            Calibrations kept before there was this field were fitted with the default.
        num_steps: Steps that the constants of transfers were fitted to; 0: they are those that the
            fit began with.
        num_gap_steps: Likewise of the kernel gap.
        median_error: Median |predicted / measured - 1| over all steps of the last fit.
        worst_error: Largest one.
    """

    send_overhead_ns: int
    receive_overhead_ns: int
    send_share: float
    receive_share: float
    engine_factor: float
    kernel_gap_ns: int = KERNEL_GAP_NS
    num_steps: int = 0
    num_gap_steps: int = 0
    median_error: float = 0.0
    worst_error: float = 0.0


class MeasuredStep(Protocol):
    """A step that was measured, and that constants can be fitted to."""

    @property
    def measured_ns(self) -> int:
        """Time of a step."""
        ...

    @property
    def num_gpus(self) -> int:
        """On how many GPUs it ran."""
        ...

    @property
    def has_kernel_gaps(self) -> bool:
        """Whether the kernel gap matters to it."""
        ...

    def predicted_ns(self, calibration: Calibration) -> int:
        """Step time by these constants, in the order that was run."""
        ...


@dataclass(frozen=True, eq=False)
class Observation:
    """A step that was measured.

    Attributes:
        graph: The step.
        costs: Its costs, by column of `machine`; they hold the kernel gap they were priced with.
        machine: The machine as probed, not calibrated.
        placement: Device per op.
        order: Per device its ops in order.
        measured_ns: Time of a step.
    """

    graph: OpGraph
    costs: CostTable
    machine: Machine
    placement: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]
    measured_ns: int

    @property
    def num_gpus(self) -> int:
        """On how many GPUs it ran."""
        pairs = zip(self.machine.devices, self.order, strict=True)
        return sum(device.traits.has_graphs and bool(row) for device, row in pairs)

    @property
    def has_kernel_gaps(self) -> bool:
        """Whether its costs tell which ops have a kernel gap."""
        return self.costs.kernels is not None

    def predicted_ns(self, calibration: Calibration) -> int:
        """Step time by these constants, in the order that was run."""
        costs = self.costs.with_kernel_gap(calibration.kernel_gap_ns)
        problem = Problem(self.graph, calibrated(self.machine, calibration), costs)
        placement = Placement(np.array(self.placement, np.int32))
        return simulate_in_order(problem, placement, self.order).makespan_ns


def calibrated(machine: Machine, calibration: Calibration) -> Machine:
    """The machine with these constants on its links between GPUs."""
    gpus = {device.name for device in machine.devices if device.traits.has_graphs}
    links = tuple(
        _calibrated(link, calibration) if {link.src, link.dst} <= gpus else link
        for link in machine.links
    )
    return Machine(machine.name, machine.devices, links, machine.pools, machine.sources)


def _calibrated(link: Link, by: Calibration) -> Link:
    points, last = [], 0
    for size, duration in link.points:
        factor = by.engine_factor if link.engine_bytes and size >= link.engine_bytes else 1.0
        last = max(last, round(duration * factor))
        points.append((size, last))
    return msgspec.structs.replace(
        link,
        points=tuple(points),
        send_overhead_ns=by.send_overhead_ns,
        receive_overhead_ns=by.receive_overhead_ns,
        send_share=by.send_share,
        receive_share=by.receive_share,
    )


def fit(
    observations: Sequence[MeasuredStep],
    start: Calibration,
    seed: int = 0,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
    constants: Collection[str] = CONSTANTS,
) -> Calibration:
    """The constants that predict measured steps best, in root mean square of log(predicted /
    measured).

    Constants of transfers are fitted to steps on two or more GPUs; the kernel gap to all whose
    costs tell where it is. With fewer than MIN_STEPS of them, they stay as they are.

    Args:
        observations: At least MIN_STEPS steps.
        start: Where to begin; no constant changes by more than a factor of MAX_CHANGE.
        seed: Of the random search.
        rounds: Constants tried; each takes one simulation per step, every GAP_EVERY-th two.
        seconds: After which no more are tried, s.
        constants: Names of those that may change.

    Raises:
        InputError: Too few steps for any of them.
    """
    free = fittable(observations, constants)
    if not free:
        raise InputError(
            f"A calibration needs at least {MIN_STEPS} measured steps that the constants matter "
            f"to, got {len(observations)} steps in all. Run more plans."
        )
    fits_links, fits_gap = free != (KERNEL_GAP,), KERNEL_GAP in free
    used = [
        one
        for one in observations
        if (fits_links and one.num_gpus > 1) or (fits_gap and one.has_kernel_gaps)
    ]
    found, predicted = _search(used, start, free, np.random.default_rng(seed), rounds, seconds)
    size = np.abs(predicted / _measured(used) - 1)
    return msgspec.structs.replace(
        found,
        num_steps=_num_several(observations) if fits_links else start.num_steps,
        num_gap_steps=_num_with_gaps(observations) if fits_gap else start.num_gap_steps,
        median_error=float(np.median(size)),
        worst_error=float(size.max()),
    )


def fittable(observations: Sequence[MeasuredStep], constants: Collection[str]) -> tuple[str, ...]:
    """Those of these constants for which there are enough steps."""
    gap = _num_with_gaps(observations) >= MIN_STEPS
    links = _num_several(observations) >= MIN_STEPS
    return tuple(
        name for name in CONSTANTS if name in constants and (gap if name == KERNEL_GAP else links)
    )


def _num_several(observations: Sequence[MeasuredStep]) -> int:
    return sum(one.num_gpus > 1 for one in observations)


def _num_with_gaps(observations: Sequence[MeasuredStep]) -> int:
    return sum(one.has_kernel_gaps for one in observations)


def _search(
    steps: Sequence[MeasuredStep],
    start: Calibration,
    free: Sequence[str],
    rng: np.random.Generator,
    rounds: int,
    seconds: float,
) -> tuple[Calibration, F64]:
    """The best constants found and what they predict, ns, shape `[steps]`."""
    until = time.monotonic() + seconds
    measured, links = _measured(steps), [name for name in free if name != KERNEL_GAP]
    best, predicted = start, _predicted(steps, start)
    for done in range(rounds):
        if time.monotonic() >= until:
            break
        tried = best
        if KERNEL_GAP in free and (done % GAP_EVERY == 0 or not links):
            tried = _with_best_gap(steps, best, start, predicted)
            if tried == best and not links:
                break
        if tried == best:
            tried = _changed(best, start, links, rng, SPREAD * (1 - done / rounds) + 0.05)
        found = _predicted(steps, tried)
        if _score(found, measured) < _score(predicted, measured):
            best, predicted = tried, found
        elif not links:
            break
    return best, predicted


def _measured(steps: Sequence[MeasuredStep]) -> F64:
    return np.array([one.measured_ns for one in steps], np.float64)


def _predicted(steps: Sequence[MeasuredStep], calibration: Calibration) -> F64:
    return np.array([one.predicted_ns(calibration) for one in steps], np.float64)


def _score(predicted: F64, measured: F64) -> float:
    return float(np.sqrt((np.log(predicted / measured) ** 2).mean()))


def _with_best_gap(
    steps: Sequence[MeasuredStep], now: Calibration, start: Calibration, predicted: F64
) -> Calibration:
    """The kernel gap that would be best if step times were linear in it, as on one GPU they are.

    Args:
        steps: What it is fitted to.
        now: The constants so far.
        start: Those that the fit began with.
        predicted: What `now` predicts, ns, shape `[steps]`.
    """
    first, gap = start.kernel_gap_ns, now.kernel_gap_ns
    more = max(1, gap // 4)
    larger = msgspec.structs.replace(now, kernel_gap_ns=gap + more)
    slope = (_predicted(steps, larger) - predicted) / more
    if not slope.any():
        return now
    gaps = np.arange(math.ceil(first / MAX_CHANGE), math.floor(first * MAX_CHANGE) + 1)
    lines = np.maximum(1.0, predicted + slope * (gaps[:, None] - gap))
    errors = (np.log(lines / _measured(steps)) ** 2).sum(1)
    return msgspec.structs.replace(now, kernel_gap_ns=int(gaps[errors.argmin()]))


def _changed(
    now: Calibration,
    start: Calibration,
    names: Sequence[str],
    rng: np.random.Generator,
    spread: float,
) -> Calibration:
    changes: dict[str, float] = {}
    for name in rng.choice(names, min(len(names), int(rng.integers(1, 3))), replace=False):
        first, value = getattr(start, name), getattr(now, name) * math.exp(rng.normal(0, spread))
        value = min(max(value, first / MAX_CHANGE), first * MAX_CHANGE)
        if name.endswith("_share"):
            value = min(value, 1.0)
        changes[str(name)] = round(value) if name.endswith("_ns") else value
    return msgspec.structs.replace(now, **changes)
