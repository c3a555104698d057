"""Plans confirmed by running."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from devplace.auto.candidates import Candidate, candidates
from devplace.auto.confirm import Confirmation, Row, confirm, confirm_trials
from devplace.auto.measure import Measurement, Measurer, Trial
from devplace.auto.timing import Timing
from devplace.errors import ExecutionError
from devplace.plan import Plan
from devplace.run.cpu import RETRY
from tests.auto.steps import captured, placed


def row(name: str, plan: Plan, measured_ns: int | None, is_single: bool = False) -> Row:
    timing = None if measured_ns is None else Timing(measured_ns, (measured_ns,), {}, "threads")
    error = "" if measured_ns is not None else "it was killed"
    return Row(
        Candidate(name, plan, plan.predicted.step_ns, is_single), Measurement(name, timing, error)
    )


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    """One on a single device, one on two."""
    found = candidates(placed(captured()[0]))
    single = next(c for c in found if c.is_single)
    several = next(c for c in found if len(c.devices) > 1)
    return single.plan, several.plan


def test_candidates_begin_with_the_single_device_and_differ() -> None:
    """The baseline comes first, equal devices are tried once, and no plan twice."""
    result = placed(captured()[0], evaluations=200)
    found = candidates(result)
    assert found[0].name == "cpu:0 alone"
    assert [c.name for c in found if c.is_single] == ["cpu:0 alone"]
    assert "even split" in [c.name for c in found]
    assert len({(c.plan.placement, c.plan.order) for c in found}) == len(found)
    assert all(c.plan.predicted.step_ns > 0 for c in found)


def test_runners_up_differ_from_the_winner_and_each_other() -> None:
    """Neighbours of the winner are no alternatives; the rest come fastest first."""
    result = placed(captured()[0], evaluations=300)
    assert result.runners_up
    problem = result.timeline.problem
    rows = [problem.task_devices(p) for p in (result.placement, *result.runners_up)]
    for k, one in enumerate(rows[1:], start=1):
        assert all(np.mean(one != other) > 0.01 for other in rows[1:k])


def test_confirming_gives_the_fastest_measured() -> None:
    """Predicted and measured time of each plan; the best is the fastest measured."""
    graph, model, optimizer, batch = captured()
    with Measurer(0.05) as measurer:
        found = confirm(placed(graph), model, optimizer, batch, measurer=measurer)
    times = [row.measured_ns for row in found.rows]
    assert all(times)
    assert found.best.measured_ns == min(ns for ns in times if ns)
    table = found.lines()
    assert len(table) == len(found.rows) + 1
    assert all(row.name in line for row, line in zip(found.rows, table[1:], strict=True))


def test_time_up_leaves_plans_untried() -> None:
    """Without time nothing is measured, and that is an error, not a prediction."""
    graph, model, optimizer, batch = captured()
    found = confirm(placed(graph), model, optimizer, batch, seconds=-1)
    assert {row.measurement.kind for row in found.rows} == {"not tried"}
    with pytest.raises(ExecutionError, match="not tried"):
        _ = found.best


def test_the_verdict_says_what_won_against_what(plans: tuple[Plan, Plan]) -> None:
    """Predictions never decide: the sentence has only measured times."""
    single, several = plans
    one = row("cpu:0 alone", single, 24_100_000, True)
    slow, fast = row("search", several, 26_000_000), row("search", several, 12_050_000)
    lost = row("search", several, None)

    def verdict(*rows: Row) -> str:
        return Confirmation(rows, 1.0).verdict()

    assert (
        verdict(one, slow) == "cpu:0 alone is fastest: measured 24.1 ms against 26 ms on 2 devices."
    )
    assert verdict(one, fast) == (
        "cpu:0 and cpu:1 are fastest: measured 12.1 ms against 24.1 ms on cpu:0 alone, "
        "2.00 times as fast."
    )
    assert verdict(fast).endswith("no single device ran the step.")
    assert verdict(one, lost).endswith("no plan on several devices could be run.")
    assert verdict(one).endswith("no other plan was worth a try.")
    assert "it was killed" in Confirmation((one, lost), 1.0).lines()[2]


def test_reasons_that_plans_share_are_told_once(plans: tuple[Plan, Plan]) -> None:
    """A batch that fails everywhere is one mistake; advice for a training loop is left out."""
    rows = (row("cpu:0 alone", plans[0], None, True), row("search", plans[1], None))
    failed = [
        dataclasses.replace(each.measurement, error=f"Op 'mm' failed: too large. {RETRY}")
        for each in rows
    ]
    rows = tuple(Row(r.candidate, m) for r, m in zip(rows, failed, strict=True))
    message = r"^None of 2 plans could be run: cpu:0 alone, search: Op 'mm' failed: too large\. Wei"
    with pytest.raises(ExecutionError, match=message):
        _ = Confirmation(rows, 1.0).best


class Scripted:
    """A measurer that gives the times it is told."""

    def __init__(self, times: list[int]) -> None:
        self.times = times
        self.names: list[str] = []

    def measure(self, trial: Trial, deadline: float | None = None) -> Measurement:
        """The next time."""
        self.names.append(trial.name)
        return row(trial.name, trial.plan, self.times.pop(0)).measurement


@pytest.mark.parametrize(
    ("times", "asked", "chosen"),
    [
        ([100, 95, 90, 97], ["single", "several", "single", "several"], "single"),
        ([100, 95, 99, 96], ["single", "several", "single", "several"], "several"),
        ([100, 105, 101, 99], ["single", "several", "several", "single"], "single"),
        ([100, 80], ["single", "several"], "several"),
    ],
)
def test_a_narrow_win_is_measured_again(
    times: list[int], asked: list[str], chosen: str, plans: tuple[Plan, Plan]
) -> None:
    """When the lead is small both are run once more and the faster time of each counts."""
    found = [Candidate("single", plans[0], 2, True), Candidate("several", plans[1], 1)]
    graph = captured()[0]
    trials = [Trial(candidate.name, candidate.plan, graph, {}) for candidate in found]
    measurer = Scripted(times)
    done = confirm_trials(found, trials, measurer, 10.0)  # type: ignore[arg-type]
    assert measurer.names == asked
    assert done.best.name == chosen
