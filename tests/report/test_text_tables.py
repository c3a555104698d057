"""The comparison of placers, for people and as JSON."""

from __future__ import annotations

import json

import pytest
from tests.report.steps import chain_graph, machine, make_problem, placed, rendered, wide_graph

from devplace.errors import InputError
from devplace.report import Skipped, comparison_json, comparison_table
from devplace.report.text_tables import memory_table


def test_json_form_is_fixed() -> None:
    """Keys and integer figures of a row that fits, one that does not, and one that was skipped."""
    problem = make_problem(chain_graph(2), machine(2, memory=4000))
    fits = placed(problem, {"layer0": "cuda:0"}, "cuda:1")
    full = placed(problem, default="cuda:0")
    found = comparison_json([fits, full, Skipped("pesto", "it needs two equal devices")])
    assert json.loads(json.dumps(found)) == found
    assert (found["model"], found["machine"]) == ("chain", "tiny")
    assert found["lower_bound_ns"] == fits.bound.step_ns
    assert found["rows"][0] == {
        "placer": "fixed",
        "step_ns": fits.step_ns,
        "feasible": True,
        "status": "feasible",
        "gap": fits.step_ns / fits.bound.step_ns - 1,
        "lower_bound_ns": fits.bound.step_ns,
        "peak_bytes": {"cuda:0": 3200, "cuda:1": 3104},
        "transfer_bytes": 200,
        "evaluations": 1,
        "seconds": fits.seconds,
    }
    assert found["rows"][1]["missing_bytes"] == {"cuda:0": 1104}
    assert found["rows"][1]["reason"] == "cuda:0 lacks 1.08 KiB"
    assert found["rows"][1]["step_ns"] == full.step_ns
    assert (found["rows"][1]["status"], found["rows"][1]["gap"]) == ("unknown", None)
    assert found["rows"][2] == {
        "placer": "pesto",
        "step_ns": None,
        "feasible": False,
        "status": "unknown",
        "gap": None,
        "lower_bound_ns": None,
        "peak_bytes": {},
        "transfer_bytes": None,
        "evaluations": None,
        "seconds": None,
        "reason": "it needs two equal devices",
    }


@pytest.mark.parametrize("width", [80, 100, 160])
def test_table_of_nine_devices_shows_everything(width: int) -> None:
    """Piped at 80 to 160 columns no line is too long, nothing is cut off, the bound is last."""
    problem = make_problem(wide_graph(40), machine(8, with_cpu=True))
    spread = {f"b{k}": problem.machine.device_names[k % 9] for k in range(40)}
    rows = [placed(problem, default="cuda:0"), placed(problem, spread)]
    text = rendered(comparison_table([*rows, Skipped("ilp", "more than 20 groups")]), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for head in (
        "placer",
        "step",
        "speed-up",
        "gap",
        "peak memory, KiB",
        "moved",
        "evals",
    ):
        assert head in lines[1]
    assert lines[1].rstrip().endswith(" s")
    assert all(word in text for word in ("more than 20", "groups"))  # folded where it is narrow
    assert "cpu=" in text
    last = [line for line in lines if line.strip()][-1]
    assert last.startswith("lower bound")


def test_infeasible_rows_keep_their_figures_and_say_what_lacks() -> None:
    """A row that does not fit shows its step and peak, and which device lacks how much."""
    problem = make_problem(chain_graph(2), machine(2, memory=4000))
    text = rendered(comparison_table([placed(problem, default="cuda:0")]), 100)
    assert "8 ms" in text
    assert "0=4.98" in text
    assert "cuda:0 lacks 1.08 KiB" in text
    assert "Speed-up is over one device without its memory limit" in text


def test_equal_neighbours_share_one_entry() -> None:
    """Devices with the same peak are shown as a range."""
    problem = make_problem(wide_graph(16), machine(8))
    spread = {f"b{k}": f"cuda:{k % 8}" for k in range(16)}
    text = rendered(comparison_table([placed(problem, spread)]), 100)
    assert "0-7=300" in text


def test_a_comparison_of_nothing_needs_the_problem() -> None:
    """Only skipped placers: an error without a problem, a table with one."""
    skipped = [Skipped("ilp", "", {"cuda:0": 5})]
    with pytest.raises(InputError, match="Pass problem="):
        comparison_table(skipped)
    problem = make_problem(chain_graph(1), machine(1))
    assert "cuda:0 lacks 5 B" in rendered(comparison_table(skipped, problem=problem), 100)
    assert comparison_json(skipped, problem=problem)["rows"][0]["missing_bytes"] == {"cuda:0": 5}


def test_limits_have_units_of_their_own() -> None:
    """A step of KiB beside a limit of GiB: neither is written in the other's unit."""
    problem = make_problem(chain_graph(2), machine(1, memory=4 * 2**30))
    text = rendered(memory_table(placed(problem, default="cuda:0").timeline), 80)
    assert "peak, KiB" in text
    assert "4 GiB" in text


def test_counts_of_simulations_stay_narrow() -> None:
    """Six figures are rounded to thousands."""
    from devplace.report.text_tables import _count

    assert [_count(n) for n in (7, 99_999, 100_000, 136_181)] == ["7", "99,999", "100k", "136k"]
