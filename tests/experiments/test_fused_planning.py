"""The page on planning fused steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = str(Path(__file__).parents[2] / "experiments")


def row(fused: bool, **changes: Any) -> dict[str, Any]:
    """A search on a step; the plain one takes 30 ms with a bound of 20, the fused 12 with 10."""
    found = {
        "workload": "gpt-2",
        "machine": "k40x4",
        "fused": fused,
        "ops": 50 if fused else 120,
        "tasks": 40 if fused else 100,
        "edges": 60 if fused else 200,
        "single_ns": 24_000_000 if fused else 60_000_000,
        "step_ns": 12_000_000 if fused else 30_000_000,
        "feasible": True,
        "bound_ns": 10_000_000 if fused else 20_000_000,
        "evaluations": 5000 if fused else 2000,
        "seconds": 10.0,
    }
    return {**found, **changes}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the page."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import search_tables

    yield search_tables.fused_planning
    for name in ("search_tables", "scaling", "common"):
        sys.modules.pop(name, None)


def test_a_row_holds_both_steps(page: Any) -> None:
    """Sizes, simulations per second, steps and gaps of both; the text counts rows."""
    data = {"seconds": 10.0, "note": "Alone.", "rows": [row(False), row(True)]}
    text = page(data, "Made here.")
    cells = "| gpt-2 | 100 / 40 | 200 / 60 | 200 / 500 | 60 / 24 | 30 / 12 | 50% / 20% |"
    assert cells in text
    assert "2.5 to 2.5 times fewer such ops (median 2.5)" in text
    assert "plain one in 1 of 1 rows, and its step is shorter in 1." in text
    assert "Made here. Alone." in text


def test_plans_that_do_not_fit_are_marked(page: Any) -> None:
    """A step over a memory limit says so."""
    rows = [row(False, feasible=False), row(True)]
    assert "| 30 *over* / 12 |" in page({"seconds": 1.0, "note": "", "rows": rows}, "Made.")
