"""Measured step times as rewards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from devplace.auto.measure import Measurer
from devplace.auto.rewards import MeasuredSteps
from devplace.auto.sources import step_sources
from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.placers import Post, place
from devplace.placers.single import all_on
from devplace.problem import Problem
from tests.auto.steps import captured, hostile


def measured(measurer: Measurer) -> tuple[Problem, MeasuredSteps]:
    """A small step on two logical CPU devices."""
    graph, model, optimizer, batch = captured()
    machine = load_machine("cpux2")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    sources = step_sources(graph, model, optimizer, batch)
    return problem, MeasuredSteps(problem, sources, measurer)


def test_a_placer_learns_from_steps_that_ran() -> None:
    """Its history holds measured times, and each different placement was run once."""
    with Measurer(0.01, in_child=False) as measurer:
        problem, steps = measured(measurer)
        found = place(problem, Post(per_update=4), "12ev", 0, measure=steps)
        times = [m.step_ns for m in steps.measurements]
        assert 1 < len(times) <= 12
        assert all(times)
        assert found.history[-1][2] == min(ns for ns in times if ns)
        placement = all_on(problem, 0)
        before = len(steps.measurements)
        first, second = steps(placement), steps(placement)
        assert first == second
        assert len(steps.measurements) <= before + 1


def test_a_placement_that_kills_its_process_is_a_failure(tmp_path: Path) -> None:
    """It counts as failed, the next one is run all the same, and the placer gets through."""
    with Measurer(0.01, command=hostile(("kill", "well"), tmp_path)) as measurer:
        problem, steps = measured(measurer)
        assert steps(all_on(problem, 0)) is None
        assert steps(all_on(problem, 1)) is not None
        assert steps.measurements[0].kind == "killed"
        assert np.isfinite(steps(all_on(problem, 1)) or np.inf)
