"""The page of the published tables."""

from __future__ import annotations

import json
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
    for name in ("published_pages", "published_systems", "plot"):
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
    page = pages.page(data, ["Made here."])
    assert "| post | 5 † (4 to 7) |" in page  # its settings were tuned on nmt-4
    assert "| post | 2 s, 50 |" in page
    assert "| scotch | 3.07 / " not in page
    pictures = pages.pictures(data)
    assert pictures["published_post_nmt-4.svg"].count("<polygon") == 1


def test_a_seed_that_breaks_a_limit_is_slower_than_all(pages: Any) -> None:
    """Of three seeds one fails: the median is the slower of the others; with two there is none."""
    runs = [run(k * 10**6, (1, k * 10**6), placer="mars-every-op") for k in (4, 5, 7)]
    runs[0]["feasible"] = False
    assert pages._step_cell(runs) == "7 † (5 to 7), 1 of 3 OOM"
    runs[1]["feasible"] = False
    assert pages._step_cell(runs) == "2 of 3 OOM"
    assert pages._ratio(runs, runs) == ""


def test_each_system_is_beside_the_climber_of_its_own_ground(pages: Any) -> None:
    """HDP places every colocation group, and counts failures as a constant; bold and italic say
    that all seeds of one are faster than all of the other."""
    ground = pages.systems.ground
    assert ground("post", True) == ("random-64", "climb-64")
    assert ground("hdp", False) == ("random-all", "climb-all")
    assert ground("hdp", True) == ("random-all", "climb-all-constant")
    assert ground("placeto", True) == ("random-64", "climb-64-per-gb")
    key, runs = "nmt-4, k40x4", {}
    for placer, steps in (("post", (4, 5)), ("climb-64", (6, 9)), ("mars", (10, 20))):
        runs[key, placer] = [run(k * 10**6, (1, k * 10**6)) for k in steps]
    assert pages._against("post", False, key, runs) == "**0.60**, -"
    assert pages._against("mars", False, key, runs) == "*2.00*, -"
    assert pages._against("hdp", False, key, runs) == ""


def test_every_system_tells_where_it_differs_and_on_what_it_was_tuned(pages: Any) -> None:
    """Read from the docstring of its module: whole entries, and names of workloads."""
    systems = pages.systems
    text = "Differs from it in:\n\n- one,\n  more.\n- two\n\nEnd.\n\n- no"
    assert systems.differences(text) == ["one, more", "two"]
    for system in systems.SYSTEMS:
        assert systems.differences(systems.docstring(system)), system
    assert {name: systems.tuned_on(name) for name in ("hdp", "post-ce", "mars", "climb-64")} == {
        "hdp": {"nmt-2"},
        "post-ce": {"nmt-4"},
        "mars": {"nmt-4"},
        "climb-64": set(),
    }
    assert systems.tuned_on("hdp-strict") == set()


def test_runs_name_a_machine_of_the_file() -> None:
    """Every run names one of the machines and commits that the file lists."""
    results = Path(__file__).parents[2] / "docs/results/published_tables.json"
    data = json.loads(results.read_text())
    assert {row["run"] for row in data["rows"]} <= set(range(len(data["runs"])))
