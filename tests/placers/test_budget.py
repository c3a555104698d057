"""Budgets."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from devplace.errors import InputError
from devplace.placers import Budget
from devplace.placers.budget import Meter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, Budget(seconds=30.0)),
        ("30s", Budget(seconds=30.0)),
        ("2min", Budget(seconds=120.0)),
        ("500ms", Budget(seconds=0.5)),
        ("2000ev", Budget(evaluations=2000)),
        (" 2000 ev , 1.5 s ", Budget(1.5, 2000)),
        (Budget(evaluations=3), Budget(evaluations=3)),
    ],
)
def test_budgets_are_read(text: str | Budget | None, expected: Budget) -> None:
    """Times, evaluations, both, and the default."""
    assert Budget.parse(text) == expected


@pytest.mark.parametrize("text", ["", "30", "ten", "30 parsecs", "5ev5", ",", "-5s", "1.5ev"])
def test_what_is_no_budget_is_named(text: str) -> None:
    """Unreadable budgets are refused with an example."""
    with pytest.raises(InputError, match="30s"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"seconds": math.inf}, "seconds is inf"),
        ({"seconds": 1e300}, "seconds is 1e"),
        ({"evaluations": math.inf}, "evaluations is inf"),
        ({"evaluations": 2**70}, "evaluations is"),
        ({"seconds": "5"}, "must be a number, got '5'"),
        ({"evaluations": True}, "must be a number, got True"),
        ({"evaluations": 2.5}, "whole number of evaluations"),
    ],
)
def test_a_budget_can_be_counted(arguments: dict[str, float], part: str) -> None:
    """What is infinite, too large or no whole number is refused by name."""
    with pytest.raises(InputError, match=part):
        Budget(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments", [{"seconds": 0}, {"seconds": -1.0}, {"evaluations": 0}, {"seconds": math.nan}]
)
def test_a_budget_is_positive(arguments: dict[str, float]) -> None:
    """Zero, negative and not-a-number budgets are refused by name."""
    with pytest.raises(InputError, match=f"{next(iter(arguments))} is"):
        Budget(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1s,2s", "5ev,6ev", "1s,5ev,1min"])
def test_a_budget_names_each_kind_once(text: str) -> None:
    """Which of two numbers counts is not guessed."""
    with pytest.raises(InputError, match=r"gives the .* twice"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["0s", "0ev"])
def test_an_empty_budget_in_text_is_refused(text: str) -> None:
    """A budget of nothing finds nothing."""
    with pytest.raises(InputError, match="must be positive"):
        Budget.parse(text)


def metered(
    monkeypatch: pytest.MonkeyPatch, budget: Budget, seconds: float, evaluations: int
) -> Meter:
    """A meter by which so much is spent, and no time passes."""
    clock = [100.0]
    monkeypatch.setattr("devplace.placers.budget.time", SimpleNamespace(monotonic=lambda: clock[0]))
    meter = Meter(budget)
    clock[0] += seconds
    meter.count(evaluations)
    return meter


@pytest.mark.parametrize(
    ("budget", "part", "is_over"),
    [
        (Budget(10.0), 0.25, False),
        (Budget(evaluations=20), 0.2, False),
        (Budget(10.0, 20), 0.25, False),
        (Budget(10.0, 8), 0.5, False),
        (Budget(10.0, 3), 1.0, True),
        (Budget(2.0, 20), 1.0, True),
        (Budget(2.5), 1.0, True),
        (Budget(), 0.0, False),
    ],
)
def test_what_is_spent_is_the_larger_part(
    budget: Budget, part: float, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of time or evaluations, at most all of it: 2.5 s and 4 evaluations of different budgets."""
    meter = metered(monkeypatch, budget, 2.5, 4)
    assert meter.fraction_spent == part
    assert meter.exhausted is is_over


def test_a_share_is_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of 10 s and 20 evaluations, of which 2 s and 4 are spent, ends at 4 s and 8; then
    the whole is there again. However little is left, one evaluation and some time are allowed."""
    meter = metered(monkeypatch, Budget(10.0, 20), 2.0, 4)
    with meter.limited_to(0.25):
        assert meter.budget == Budget(4.0, 8)
        assert meter.left(9) == 4
    assert meter.budget == Budget(10.0, 20)
    assert (meter.left(9), meter.left(99)) == (9, 16)
    late = metered(monkeypatch, Budget(2.0, 1), 2.0, 0)
    with late.limited_to(0.25):
        assert late.budget == Budget(2.0, 1)


def test_progress_is_told_as_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that goes on from a checkpoint counts what was spent before."""
    told: list[float] = []
    meter = Meter(Budget(evaluations=8), told.append)
    meter.count(2)
    meter.tell()
    meter.go_on(num_evaluations=4, seconds=7.0)
    meter.tell()
    assert told == [0.25, 0.5]
    assert 7.0 <= meter.seconds < 70.0
