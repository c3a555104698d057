"""Budgets."""

from __future__ import annotations

import math

import pytest

from devplace.errors import InputError
from devplace.placers import Budget


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
