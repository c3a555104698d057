"""Measured step times as rewards."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from devplace.cost.analytic import Analytic
from devplace.files import alone
from devplace.machine import load_machine
from devplace.placers import Post, place
from devplace.placers.simple.single import all_on
from devplace.problem import Problem
from devplace.tune.measure import Measurer
from devplace.tune.rewards import MeasuredSteps
from devplace.tune.step_sources import step_sources
from tests.tune.steps import LONG_S, captured, hostile


def measured(*measurers: Measurer) -> tuple[Problem, MeasuredSteps]:
    """A small step on two logical CPU devices."""
    graph, model, optimizer, batch = captured()
    machine = load_machine("cpux2")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    sources = step_sources(graph, model, optimizer, batch)
    return problem, MeasuredSteps(problem, sources, *measurers)


@pytest.mark.slow
def test_a_placer_learns_from_steps_that_ran() -> None:
    """Its history holds measured times, and each different placement was run once."""
    with Measurer(0.01, in_child=False) as measurer:
        problem, steps = measured(measurer)
        found = place(problem, Post(per_update=4), "12ev", 0, measure=steps)
        times = [m.step_ns for m in steps.measurements]
        assert 1 < len(times) <= 12
        assert all(times)
        assert len(steps.predicted_ns) == len(times)
        assert all(steps.predicted_ns)
        assert found.history[-1][2] == min(ns for ns in times if ns)
        placement = all_on(problem, 0)
        before = len(steps.measurements)
        first, second = steps(placement), steps(placement)
        assert first == second
        assert len(steps.measurements) <= before + 1


@pytest.mark.slow
def test_a_placement_that_kills_its_process_is_a_failure(tmp_path: Path) -> None:
    """It counts as failed, the next one is run all the same, and the placer gets through."""
    command = hostile(("kill", "well"), tmp_path)
    with Measurer(0.01, time_limit_s=LONG_S, command=command) as measurer:
        problem, steps = measured(measurer)
        assert steps(all_on(problem, 0)) is None
        assert steps(all_on(problem, 1)) is not None
        assert steps.measurements[0].kind == "killed"
        assert np.isfinite(steps(all_on(problem, 1)) or np.inf)


@pytest.mark.slow
def test_several_measurers_share_the_placements_of_an_update(tmp_path: Path) -> None:
    """Each placement is run once, by one of them; equal ones in one update count as one."""
    lock = str(tmp_path / "lock")
    with ExitStack() as stack:
        measurers = [
            stack.enter_context(Measurer(0.01, time_limit_s=LONG_S, lock=lock)) for _ in range(2)
        ]
        problem, steps = measured(*measurers)
        first, second = all_on(problem, 0), all_on(problem, 1)
        times = steps.many([first, second, first])
        assert times[0] == times[2]
        assert all(times)
        assert len(steps.measurements) == 2
        assert all(m.child is not None and m.child.is_there for m in measurers)
        found = place(problem, Post(per_update=4), "8ev", 0, measure=steps)
        assert found.history[-1][2] in {m.step_ns for m in steps.measurements}


def test_a_lock_keeps_others_out(tmp_path: Path) -> None:
    """Whoever has the same file waits; without a file nobody does."""
    lock, entered = str(tmp_path / "lock"), threading.Event()

    def enter() -> None:
        with alone(lock):
            entered.set()

    with alone(lock):
        other = threading.Thread(target=enter)
        other.start()
        time.sleep(0.05)
        assert not entered.is_set()
        with alone(None):
            pass
    other.join(timeout=100)
    assert entered.is_set()
