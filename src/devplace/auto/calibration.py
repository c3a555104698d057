"""Constants of a machine that show only in whole steps, fitted to steps that were measured.

A probe times a transfer alone. In a step it also delays ops that run meanwhile (memory and
multiprocessors are shared), is itself slower than alone, and the fork and join it brings into a
CUDA graph cost more the larger the graph is. These are priced by five numbers for all links between
GPUs: `Link.send_overhead_ns`, `receive_overhead_ns`, `send_share`, `receive_share`, and a factor on
the measured times of large transfers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from devplace.cost import CostTable
from devplace.errors import InputError
from devplace.graph import OpGraph
from devplace.machine import Link, Machine
from devplace.problem import Placement, Problem
from devplace.simulator.in_order import simulate_in_order

ROUNDS = 60
SPREAD = 0.4
LEAST_STEPS = 4
# Largest changes from the constants a fit starts with; with few steps it could go anywhere.
MOST_CHANGE = 4.0


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer between GPUs costs inside a step beside what a probe shows.

    Attributes:
        send_overhead_ns: Time it takes of the sender's ops, ns.
        receive_overhead_ns: Time it takes of the receiver's ops, ns.
        send_share: Part of its duration by which it delays the sender's ops besides.
        receive_share: Likewise of the receiver's ops.
        engine_factor: Duration of a large transfer in a step / alone.
        num_steps: Steps it was fitted to.
        median_error: Median |predicted / measured - 1| over them.
        worst_error: Largest one.
    """

    send_overhead_ns: int
    receive_overhead_ns: int
    send_share: float
    receive_share: float
    engine_factor: float
    num_steps: int = 0
    median_error: float = 0.0
    worst_error: float = 0.0


@dataclass(frozen=True, eq=False)
class Observation:
    """A step that was measured.

    Attributes:
        graph: The step.
        costs: Its costs, by column of `machine`.
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

    def predicted_ns(self, calibration: Calibration) -> int:
        """Step time by these constants, in the order that was run."""
        problem = Problem(self.graph, calibrated(self.machine, calibration), self.costs)
        placement = Placement(np.array(self.placement, np.int32))
        return simulate_in_order(problem, placement, self.order).makespan_ns


def calibrated(machine: Machine, calibration: Calibration) -> Machine:
    """The machine with these constants on its links between GPUs."""
    gpus = {device.name for device in machine.devices if device.kind == "gpu"}
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
    observations: Sequence[Observation],
    start: Calibration,
    seed: int = 0,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
) -> Calibration:
    """The constants that predict measured steps best, in root mean square of log(predicted /
    measured).

    Args:
        observations: At least LEAST_STEPS steps, on two or more GPUs.
        start: Where to begin; no constant changes by more than a factor of MOST_CHANGE.
        seed: Of the random search.
        rounds: Constants tried; each takes one simulation per step.
        seconds: After which no more are tried, s.

    Raises:
        InputError: Too few steps.
    """
    if len(observations) < LEAST_STEPS:
        raise InputError(
            f"A calibration needs at least {LEAST_STEPS} measured steps, got {len(observations)}. "
            "Run more plans."
        )
    rng = np.random.default_rng(seed)
    until = time.monotonic() + seconds
    best, errors = start, _log_errors(observations, start)
    for done in range(rounds):
        if time.monotonic() >= until:
            break
        spread = SPREAD * (1 - done / rounds) + 0.05
        tried = _changed(best, start, rng, spread)
        found = _log_errors(observations, tried)
        if _score(found) < _score(errors):
            best, errors = tried, found
    size = np.abs(np.exp(errors) - 1)
    return msgspec.structs.replace(
        best,
        num_steps=len(observations),
        median_error=float(np.median(size)),
        worst_error=float(size.max()),
    )


def _log_errors(observations: Sequence[Observation], calibration: Calibration) -> np.ndarray:
    return np.array(
        [math.log(one.predicted_ns(calibration) / one.measured_ns) for one in observations]
    )


def _score(errors: np.ndarray) -> float:
    return float(np.sqrt((errors**2).mean()))


_CONSTANTS = (
    "send_overhead_ns",
    "receive_overhead_ns",
    "send_share",
    "receive_share",
    "engine_factor",
)


def _changed(
    now: Calibration, start: Calibration, rng: np.random.Generator, spread: float
) -> Calibration:
    changes: dict[str, float] = {}
    for name in rng.choice(_CONSTANTS, int(rng.integers(1, 3)), replace=False):
        first, value = getattr(start, name), getattr(now, name) * math.exp(rng.normal(0, spread))
        value = min(max(value, first / MOST_CHANGE), first * MOST_CHANGE)
        if name.endswith("_share"):
            value = min(value, 1.0)
        changes[str(name)] = round(value) if name.endswith("_ns") else value
    return msgspec.structs.replace(now, **changes)
