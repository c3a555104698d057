"""Constants of this machine, learnt once from plans that were measured, and kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from devplace.auto.calibration import LEAST_STEPS, Calibration, Observation, fit
from devplace.auto.confirm import Row
from devplace.machine import Machine
from devplace.problem import Problem

KIND = "calibration"
ROUNDS = 20
LEAST_SECONDS, MOST_SECONDS = 2.0, 10.0
_log = logging.getLogger(__name__)


def kept_calibration(machine: Machine) -> Calibration | None:
    """The constants kept for this machine; a damaged file counts as none."""
    from devplace.run.probe import probe_key
    from devplace.run.probe.cache import kept_text

    text = kept_text(KIND, probe_key(machine))
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Calibration)
    except ValueError as error:
        _log.warning("Kept calibration is not used: %s", error)
        return None


def learn(
    probed: Machine,
    measured: Sequence[tuple[Row, Problem]],
    start: Calibration,
    seconds: float = MOST_SECONDS,
) -> Calibration | None:
    """Fit the machine's constants to measured plans and keep them, unless some are kept already.

    Args:
        probed: The machine as probed, not calibrated.
        measured: Plans that were run, with the problems they solve.
        start: The constants they were predicted with.
        seconds: How long it may take, about, s.

    Returns:
        The new constants, if there were enough plans and these predict them better.
    """
    if seconds < LEAST_SECONDS or kept_calibration(probed) is not None:
        return None
    steps = [
        Observation(
            problem.graph,
            problem.costs,
            probed,
            row.plan.placement,
            row.plan.order,
            row.measured_ns,
        )
        for row, problem in measured
        if row.measured_ns is not None
        and len(row.candidate.devices) > 1
        and row.measurement.timing is not None
        and row.measurement.timing.mode == "graph"
    ]
    if len(steps) < LEAST_STEPS:
        return None
    found = fit(steps, start, rounds=ROUNDS, seconds=min(seconds, MOST_SECONDS))
    if found.median_error >= fit(steps, start, rounds=0).median_error:
        return None
    from devplace.run.probe import probe_key
    from devplace.run.probe.cache import keep_text

    keep_text(KIND, probe_key(probed), msgspec.json.encode(found).decode())
    return found
