"""Fitted constants of this machine, kept on disk between runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from devplace.machine import Machine
from devplace.problem import Problem
from devplace.tune.calibration import (
    KERNEL_GAP,
    LINK_CONSTANTS,
    MIN_STEPS,
    Calibration,
    MeasuredStep,
    Observation,
    fit,
)
from devplace.tune.confirm import ConfirmedRow
from devplace.tune.kept_calibration import KIND, kept_calibration
from devplace.tune.measured_costs import HOPPER, probed_machine
from devplace.tune.single_steps import SingleStep, remembered

ROUNDS = 20
MIN_SECONDS, MAX_SECONDS = 2.0, 10.0
ENOUGH = 0.03  # median error of steps that no constants of transfers are fitted to


def learn_from(
    rows: Sequence[ConfirmedRow], seconds: float, tell: Callable[[str], None]
) -> Calibration | None:
    """Calibrate this computer's GPUs with plans that were measured, where ops were; see `learn`."""
    problems = [row.candidate.problem for row in rows]
    has_gpu = any(device.traits.has_graphs for device in problems[0].machine.devices)
    if not has_gpu or problems[0].costs.origin != "profiled":
        return None
    tell("calibrating the machine")
    pairs = list(zip(rows, problems, strict=True))
    return learn(probed_machine(problems[0].machine), pairs, HOPPER, seconds)


def learn(
    probed: Machine,
    measured: Sequence[tuple[ConfirmedRow, Problem]],
    start: Calibration,
    seconds: float = MAX_SECONDS,
) -> Calibration | None:
    """Fit the machine's constants to measured plans and keep them.

    Constants of transfers are fitted once, to plans of one call: they are part of a machine's
    fingerprint, so that plan files remain valid only if they stay. Times of ops are scaled for it
    so that the step on one GPU is as measured: else the fit puts their error down to transfers.
    Nothing is fitted where the first constants are off by no more than ENOUGH, which may be chance.
    The kernel gap differs from step to step and hardly between plans of one step, so it is fitted
    to different steps on one GPU, at least MIN_STEPS. A call measures one or two of them; they
    are kept, and each new one improves the gap.

    Args:
        probed: The machine as probed, not calibrated.
        measured: Plans that were run, with the problems they solve.
        start: The constants to begin with where none are kept.
        seconds: How long it may take, about, s.

    Returns:
        The new constants, if there were enough plans and these predict them better.
    """
    kept = kept_calibration(probed) or start
    ran = [(row, problem) for row, problem in measured if _is_usable(row, problem)]
    fresh = [_single_step(row, problem) for row, problem in ran if _num_gpus(row) == 1]
    singles = remembered(probed, [one for one in fresh if one.has_kernel_gaps])
    if seconds < MIN_SECONDS:
        return None
    found, limit = kept, min(seconds, MAX_SECONDS)
    if len(singles) >= max(MIN_STEPS, kept.num_gap_steps + 1):
        found = _with_fitted_gap(singles, found, start)
    scales = {one.graph: one.measured_ns / one.predicted_ns(found) for one in fresh}
    several = [
        _observation(probed, row, problem, found, scales.get(row.plan.fingerprints.graph, 1.0))
        for row, problem in ran
        if _num_gpus(row) > 1
    ]
    if not kept.num_steps and len(several) >= MIN_STEPS:
        found = _with_fitted_links(several, found, limit)
    if found is kept:
        return None
    from devplace.run.probe import probe_key
    from devplace.run.probe.kept_probe import keep_text

    keep_text(KIND, probe_key(probed), msgspec.json.encode(found).decode())
    return found


def _with_fitted_gap(
    steps: Sequence[SingleStep], now: Calibration, start: Calibration
) -> Calibration:
    """Fitted from the first gap on: however often, it keeps to the largest change of that."""
    begin = msgspec.structs.replace(now, kernel_gap_ns=start.kernel_gap_ns)
    found = fit(steps, begin, constants=(KERNEL_GAP,))
    return found if found.kernel_gap_ns != now.kernel_gap_ns else now


def _with_fitted_links(
    steps: Sequence[MeasuredStep], now: Calibration, seconds: float
) -> Calibration:
    """Fitted constants of transfers, if they predict the steps better and that is needed."""
    before = fit(steps, now, rounds=0, constants=LINK_CONSTANTS)
    if before.median_error <= ENOUGH:
        return now
    found = fit(steps, now, rounds=ROUNDS, seconds=seconds, constants=LINK_CONSTANTS)
    return found if found.median_error < before.median_error else now


def _is_usable(row: ConfirmedRow, problem: Problem) -> bool:
    """Whether the plan ran as CUDA graphs, on GPUs alone: no constant is about CPUs."""
    timing = row.measurement.timing
    if not row.measured_ns or timing is None or timing.mode != "graph":
        return False
    pairs = zip(problem.machine.devices, row.plan.order, strict=True)
    return all(device.traits.has_graphs for device, order in pairs if order)


def _num_gpus(row: ConfirmedRow) -> int:
    """Of a usable row."""
    return sum(bool(order) for order in row.plan.order)


def _observation(
    probed: Machine, row: ConfirmedRow, problem: Problem, now: Calibration, scale: float
) -> Observation:
    """A plan that ran, its ops with the gap of `now` and so many times as long."""
    plan, ns = row.plan, row.measured_ns or 0
    costs = problem.costs.in_order(problem.graph, plan.order).with_kernel_gap(now.kernel_gap_ns)
    costs = replace(costs, compute_ns=np.rint(costs.compute_ns * scale).astype(np.int64))
    return Observation(problem.graph, costs, probed, plan.placement, plan.order, ns)


def _single_step(row: ConfirmedRow, problem: Problem) -> SingleStep:
    """The step as its sums: on one GPU one op runs after the other."""
    (device,) = (number for number, order in enumerate(row.plan.order) if order)
    ops = list(row.plan.order[device])
    costs = problem.costs.in_order(problem.graph, row.plan.order).with_kernel_gap(0)
    task_devices = np.full(problem.core.tasks.num_tasks, device, np.int32)
    return SingleStep(
        graph=row.plan.fingerprints.graph,
        device=problem.machine.device_names[device],
        base_ns=int(costs.compute_ns[ops, device].sum()) + problem.core.batch_ns(task_devices),
        num_kernels=0 if costs.kernels is None else int(costs.kernels[ops, device].sum()),
        measured_ns=row.measured_ns or 0,
    )
