"""Plans confirmed by running."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from devplace.errors import ExecutionError
from devplace.plan import Plan
from devplace.run.cpu import RETRY
from devplace.step_capture import capture
from devplace.tune.candidates import Candidate, candidates
from devplace.tune.confirm import TIE, Confirmation, ConfirmedRow, confirm, confirm_trials
from devplace.tune.measure import Measurement, Measurer, Trial
from devplace.tune.ordinary import Ordinary, time_ordinary
from devplace.tune.step_timing import StepTiming
from tests.tune.steps import LONG_S, captured, placed, tagger


def row(name: str, plan: Plan, measured_ns: int | None, is_single: bool = False) -> ConfirmedRow:
    timing = None if measured_ns is None else StepTiming(measured_ns, (measured_ns,), {}, "threads")
    error = "" if measured_ns is not None else "it was killed"
    return ConfirmedRow(
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


@pytest.mark.slow
def test_confirming_gives_the_fastest_measured() -> None:
    """Predicted and measured time of each plan; the best is the fastest measured."""
    graph, *_, batch = captured()
    with Measurer(0.05, time_limit_s=LONG_S) as measurer:
        found = confirm(placed(graph), batch, measurer=measurer, seconds=5 * LONG_S)
    times = [row.measured_ns for row in found.rows]
    assert all(times)
    assert (found.best.measured_ns or 0) <= TIE * min(ns for ns in times if ns)
    assert found.ordinary is not None
    assert found.ordinary.timing is not None
    table = found.lines()
    assert len(table) == len(found.rows) + 1
    assert all(row.name in line for row, line in zip(found.rows, table[1:], strict=True))


def test_time_up_leaves_plans_untried() -> None:
    """Without time nothing is measured, and that is an error, not a prediction."""
    graph, *_, batch = captured()
    found = confirm(placed(graph), batch, seconds=-1)
    assert {row.measurement.kind for row in found.rows} == {"not tried"}
    with pytest.raises(ExecutionError, match="not tried"):
        _ = found.best


def test_the_verdict_says_what_won_against_what(plans: tuple[Plan, Plan]) -> None:
    """Predictions never decide: the sentence has only measured times."""
    single, several = plans
    one = row("cpu:0 alone", single, 24_100_000, True)
    slow, fast = row("search", several, 26_000_000), row("search", several, 12_050_000)
    lost = row("search", several, None)

    def verdict(*rows: ConfirmedRow) -> str:
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
    rows = tuple(ConfirmedRow(r.candidate, m) for r, m in zip(rows, failed, strict=True))
    message = r"^None of 2 plans could be run: cpu:0 alone, search: Op 'mm' failed: too large\. Wei"
    with pytest.raises(ExecutionError, match=message):
        _ = Confirmation(rows, 1.0).best


class Scripted:
    """A measurer that gives each plan the times it is told, the last of them again and again."""

    def __init__(self, times: dict[str, list[int]]) -> None:
        self.times = times
        self.names: list[str] = []

    def measure(self, trial: Trial, deadline: float | None = None) -> Measurement:
        """The plan's next time."""
        self.names.append(trial.name)
        times = self.times[trial.name]
        ns = times.pop(0) if len(times) > 1 else times[0]
        return row(trial.name, trial.plan, ns).measurement


def scripted(plans: tuple[Plan, Plan], times: dict[str, list[int]]) -> tuple[Confirmation, str]:
    """What is confirmed with such times, `s...` on one device and others on two; and what was
    measured, in order."""
    found = [Candidate(n, plans[n[0] != "s"], 1, n[0] == "s") for n in times]
    graph = captured()[0]
    trials = [Trial(candidate.name, candidate.plan, graph, {}) for candidate in found]
    measurer = Scripted({name: list(each) for name, each in times.items()})
    done = confirm_trials(found, trials, measurer, 10.0)  # type: ignore[arg-type]
    return done, " ".join(measurer.names)


@pytest.mark.parametrize(
    ("times", "asked", "chosen"),
    [
        ({"s": [100, 90], "m": [95, 97]}, "s m s m m s", "s"),
        ({"s": [100, 99, 98], "m": [95, 93]}, "s m s m s m", "m"),
        ({"s": [100, 101], "m": [105, 80]}, "s m m s", "m"),
        ({"s": [100], "m": [80]}, "s m", "m"),
        ({"s": [100], "m": [99]}, "s m m s m s", "s"),
        ({"s": [300], "m": [200], "n": [210], "o": [400]}, "s m n o n m n m", "m"),
    ],
)
def test_a_narrow_win_is_measured_again_in_turn(
    times: dict[str, list[int]], asked: str, chosen: str, plans: tuple[Plan, Plan]
) -> None:
    """When the lead is small those in the lead are run again in turn, and the faster time of each
    counts; of what is equal within what measurements differ by, the first tried is taken."""
    done, names = scripted(plans, times)
    assert names == asked
    assert done.best.name == chosen
    assert done.ranked[0] is done.best


def test_a_speed_up_above_the_number_of_devices_is_measured_again_and_withdrawn(
    plans: tuple[Plan, Plan],
) -> None:
    """A single device that was timed while the computer was busy: its second time counts. What
    stays above is told without a number."""
    done, names = scripted(plans, {"s": [664, 150], "m": [100]})
    assert names == "s m s m"
    assert done.verdict().endswith("1.50 times as fast.")
    done, names = scripted(plans, {"s": [664], "m": [100]})
    assert names == "s m s m s m"
    assert "times as fast" not in done.verdict()
    assert "more than 2 devices can gain" in done.verdict()
    assert "No speed-up is claimed" in done.verdict()


def test_the_spread_of_all_rounds_is_shown(plans: tuple[Plan, Plan]) -> None:
    """Rounds of every visit count, and the step time is that of the faster one."""
    done, _ = scripted(plans, {"s": [100, 95], "m": [95, 100]})
    assert [row.spread for row in done.rows] == [pytest.approx(5 / 95)] * 2
    assert "5%" in done.lines()[1]
    assert done.rows[0].as_json()["spread"] == done.rows[0].spread


@pytest.mark.parametrize(("own_ns", "wins"), [(90, True), (100, False), (300, False)])
def test_the_users_own_step_is_told_beside_the_plans(
    own_ns: int, wins: bool, plans: tuple[Plan, Plan]
) -> None:
    """Its time is in the verdict, and that devplace does not pay where it is the fastest."""
    own = Ordinary(StepTiming(own_ns, (own_ns,), {}, "cpu"))
    rows = (row("cpu:0 alone", plans[0], 200, True), row("search", plans[1], 100))
    said = Confirmation(rows, 1.0, own).verdict()
    assert f"The ordinary step takes {own_ns} ns" in said
    assert ("does not pay" in said) == wins
    unknown = Confirmation(rows, 1.0, Ordinary(reason="it failed")).verdict()
    assert unknown.endswith("The ordinary step was not timed: it failed.")


def test_the_users_own_step_is_timed_on_copies() -> None:
    """Nothing of the user's changes: values, optimizer, generators, or what functions log."""
    model, batch, _ = tagger()
    log: list[int] = []

    def loss(model: Any, words: Any, labels: Any) -> Any:
        log.append(1)
        return F.cross_entropy(model(words), labels)

    optimizer = torch.optim.Adam(model.parameters())
    graph = capture(model, batch, loss, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    own = time_ordinary(graph, model, optimizer, batch)
    assert own.timing is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert not log
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_timed_eagerly_says_why() -> None:
    """A model without values, and one whose own step fails."""
    graph, model, optimizer, batch = captured()
    meta = copy.deepcopy(model).to("meta")
    assert "has no values" in str(time_ordinary(graph, meta, optimizer, batch))
    wrong = (batch[0], batch[1][:3])
    assert "it failed: ValueError" in str(time_ordinary(graph, model, optimizer, wrong))
