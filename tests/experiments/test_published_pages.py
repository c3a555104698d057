"""The page of the published tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = str(Path(__file__).parents[2] / "experiments")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which is run from its folder."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import published_pages

    yield published_pages
    for name in ("published_pages", "plot"):
        sys.modules.pop(name, None)


def run(step_ns: int, *history: tuple[int, int], placer: str = "post") -> dict[str, Any]:
    """A run with this history."""
    return {
        "workload": "nmt-4",
        "machine": "k40x4",
        "placer": placer,
        "seed": 0,
        "step_ns": step_ns,
        "feasible": True,
        "lower_bound_ns": 50,
        "evaluations": 100,
        "cpu_s": 2.0,
        "history": [list(pair) for pair in history],
    }


def test_samples_are_counted_until_the_step_stays_close_to_the_best(pages: Any) -> None:
    """105 is within 5 % of 100; an early value that later got worse does not count."""
    assert pages.samples_to_reach(run(100, (1, 200), (7, 105), (9, 100))) == 7
    assert pages.samples_to_reach(run(100, (1, 90), (3, 200), (9, 100))) == 9
    assert pages.samples_to_reach(run(100, (4, 100))) == 4


def test_the_best_so_far_is_that_of_the_last_improvement(pages: Any) -> None:
    """Before the first placement that fits there is none."""
    found = pages.best_after(run(100, (3, 200), (9, 100)), [2, 3, 8, 9, 50])
    assert found == [None, 200, 200, 100, 100]


def test_median_and_spread_of_the_seeds_are_shown(pages: Any) -> None:
    """The page has both tables, and a picture of each kind with a band per placer."""
    rows = [run(k * 10**6, (1, 9 * 10**6), (50, k * 10**6)) for k in (4, 5, 7)]
    rows.append(run(8 * 10**6, (1, 8 * 10**6), placer="expert"))
    rows.append(run(9 * 10**6, (1, 9 * 10**6), placer="cpu"))
    problem = {"table": "hdp", "workload": "nmt-4", "machine": "k40x4", "limit": None}
    data = {"budget": 100, "problems": [problem], "rows": rows}
    page = pages.page(data, "Made here.")
    assert "| post | 5 (4 to 7) |" in page
    assert "| post | 2 s, 50 |" in page
    assert "| scotch | 3.07 / " not in page
    pictures = pages.pictures(data)
    assert pictures["published_post_nmt-4.svg"].count("<polygon") == 1
