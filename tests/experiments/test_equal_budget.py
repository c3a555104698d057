"""Plain annealing counts its simulations; schedules of others are checked before they count."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from devplace import placers
from devplace.placers import Budget, Evaluator
from devplace.simulator import simulate
from devplace.testing.layered import layered_problem
from devplace.testing.tiny import tiny_problems

FOLDER = str(Path(__file__).parents[2] / "experiments")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts as modules."""
    monkeypatch.syspath_prepend(FOLDER)
    import equal_budget
    import saga_oracle

    yield SimpleNamespace(budget=equal_budget, oracle=saga_oracle)
    for name in ("equal_budget", "saga_oracle", "common"):
        sys.modules.pop(name, None)


def test_annealing_spends_its_budget_and_gains(scripts: Any) -> None:
    """Exactly as many simulations as allowed, and never worse than where it began."""
    problem = layered_problem(200, 4)
    start = placers.place(problem, placers.Single(), "100ev").step_ns
    evaluate = Evaluator(problem, Budget.parse("300ev"), threads=1)
    placement = scripts.budget.Annealing()(problem, evaluate, np.random.default_rng(0))
    assert evaluate.meter.num_evaluations == 300
    assert simulate(problem, placement).makespan_ns < start
    assert not problem.violations(placement)


def test_annealing_solves_tiny_problems(scripts: Any) -> None:
    """Hot enough and with many moves, it finds what was found by hand, memory limits included."""
    hot = scripts.budget.Annealing(hot=0.5, cold=1e-3)
    for tiny in tiny_problems():
        found = placers.place(tiny.problem, hot, "600ev", 0)
        assert found.is_feasible
        assert found.step_ns == tiny.step_ns, tiny.name


def test_a_run_in_the_file_is_not_done_again(scripts: Any) -> None:
    """Jobs are told apart by problem, budget, placer and seed."""
    options = argparse.Namespace(machines="k40x4", budget="9ev", seeds=2)
    wanted = list(scripts.budget.jobs("rnnlm", options))
    done = [{**job, "step_ns": 1, "run": 0} for job in wanted]
    assert all(scripts.budget._is_in(job, done) for job in wanted)
    options.budget = "10ev"
    again = [job for job in scripts.budget.jobs("rnnlm", options) if "placer" in job]
    assert not any(scripts.budget._is_in(job, done) for job in again)


def _schedule(starts: dict[str, tuple[str, float, float]]) -> tuple[Any, Any, Any]:
    """A stand-in for SAGA's graph a -> b with an edge of 2, network of two, and a schedule."""
    edge = SimpleNamespace(source="a", target="b", size=2.0)
    graph = SimpleNamespace(tasks=["a", "b"], dependencies=[edge])
    pairs = (("x", "y", 1.0), ("x", "x", float("inf")), ("y", "y", float("inf")))
    edges = [SimpleNamespace(source=s, target=t, speed=v) for s, t, v in pairs]
    rows: dict[str, list[Any]] = {"x": [], "y": []}
    for name, (node, start, end) in starts.items():
        rows[node].append(SimpleNamespace(name=name, node=node, start=start, end=end))
    end = max(task.end for row in rows.values() for task in row)
    return graph, SimpleNamespace(edges=edges), _Rows(rows, end)


class _Rows(dict[str, Any]):
    def __init__(self, rows: dict[str, Any], makespan: float) -> None:
        super().__init__(rows)
        self.makespan = makespan


def test_a_schedule_that_breaks_its_own_rules_is_told(scripts: Any) -> None:
    """A lost task, two at once on a device, and a start before the input are found."""
    broken = scripts.oracle.broken_rule
    assert broken(*_schedule({"a": ("x", 0, 5), "b": ("y", 7, 9)})) == ""
    assert broken(*_schedule({"a": ("x", 0, 5), "b": ("x", 5, 7)})) == ""
    assert "1 of 2 tasks" in broken(*_schedule({"a": ("x", 0, 5)}))
    assert "same device" in broken(*_schedule({"a": ("x", 0, 5), "b": ("x", 4, 6)}))
    assert "arrives" in broken(*_schedule({"a": ("x", 0, 5), "b": ("y", 6, 8)}))


def test_values_that_differ_are_counted(scripts: Any) -> None:
    """Equal, earlier and broken schedules are told apart; a later one is in none of them."""
    rows = [
        {"own_ns": 5.0, "free": 5},
        {"own_ns": 5.0, "free": 4},
        {"own_ns": 5.0, "free": 6},
        {"own_ns": 5.0, "reason": "1 of 2 tasks are scheduled"},
        {"by_saga_ns": 5.0, "free": 5},
    ]
    found = scripts.oracle.checks(rows, [{"search_ns": 7, "brute_force_ns": 6.0}])
    assert (found["theirs_valued"], found["theirs_equal"], found["theirs_earlier"]) == (3, 1, 1)
    assert (found["theirs_broken"], found["ours_valued"], found["ours_equal"]) == (1, 1, 1)
    assert (found["tiny_equal"], found["tiny_worse"]) == (0, 1)
