"""`--objective throughput` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.runner import MLP, devplace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model file."""
    (tmp_path / "mlp.py").write_text(MLP)
    return tmp_path


@pytest.mark.slow
def test_plan_explain_and_run(folder: Path) -> None:
    """The plan says what its number means, keeps the objective, and runs like any other."""
    made = devplace(
        *("plan", "mlp.py:build", "--machine", "cpux2", "--budget", "200ev"),
        *("--objective", "throughput", "-o", "plan.json"),
        cwd=folder,
    )
    assert made.returncode == 0, made.stderr
    assert "per step of a full pipeline" in made.stdout
    assert "runs one step at a time" in made.stdout
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["request"]["objective"] == "throughput"
    assert plan["predicted"]["max_load_ns"] > 0
    told = devplace("explain", "plan.json", cwd=folder)
    assert "Made for throughput" in told.stdout
    ran = devplace("run", "plan.json", "--steps", "2", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert "bit for bit equal" in ran.stdout


@pytest.mark.slow
def test_compare_json(folder: Path) -> None:
    """Every row has its largest load, `contiguous` is among them and `search` is the best."""
    done = devplace(
        *("compare", "mlp.py:build", "--machine", "k40x2", "--budget", "60ev", "--json"),
        *("--objective", "throughput"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["placer"]: row for row in json.loads(done.stdout)["rows"]}
    loads = {name: row["max_load_ns"] for name, row in rows.items() if "max_load_ns" in row}
    assert "contiguous" in loads
    assert loads["search"] == min(loads.values())
    for row in rows.values():
        if "loads_ns" in row:
            assert row["max_load_ns"] == max(row["loads_ns"].values())
            assert row["load_bound_ns"] <= row["max_load_ns"]


def test_what_does_not_go_together_is_refused(folder: Path) -> None:
    """An unknown objective, and measuring a pipeline that devplace cannot run."""
    for more, word in ((["--objective", "thruput"], "throughput"), (CONFIRMED, "--confirm")):
        done = devplace("plan", "mlp.py:build", "--machine", "cpux2", *more, cwd=folder)
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr


CONFIRMED = ["--objective", "throughput", "--confirm"]
