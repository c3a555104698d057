"""Commands that run plans: confirming, running, deviations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.runner import PATIENT, devplace, folder, refused

from devplace.tune.confirm import TIE

__all__ = ["folder"]


@pytest.mark.slow
def test_confirm_writes_the_fastest_measured_plan(folder: Path) -> None:
    """The table has predicted and measured times; the plan that is written is the winner's: the
    first tried of those that are as good as the fastest."""
    done = devplace(
        *("plan", "mlp.py:build", "--machine", "cpux2", "--budget", "40ev", "--confirm"),
        *("-o", "confirmed.json", "--json"),
        cwd=folder,
        script=PATIENT,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    rows = data["confirmation"]
    assert all(row["measured_ns"] for row in rows), [row["error"] for row in rows]
    fastest = min(row["measured_ns"] for row in rows)
    best = next(row for row in rows if row["measured_ns"] <= TIE * fastest)
    assert rows[0]["name"] == "cpu:0 alone"
    assert data["placer"] == best["name"]
    assert data["measured_ns"] == best["measured_ns"]
    plan = json.loads((folder / "confirmed.json").read_text())
    used = [name for name, order in plan["order"].items() if order]
    assert used == best["devices"]
    assert plan["request"]["device"] == "cpu"


@pytest.mark.slow
def test_confirm_needs_the_plans_devices(folder: Path) -> None:
    """A machine that is not this one cannot confirm anything: exit code 2 and why."""
    done = devplace("plan", "mlp.py:build", "--machine", "k40x2", "--confirm", cwd=folder)
    refused(done, 2, "Only devices of this computer", "k40x2")


@pytest.mark.slow
def test_deviations_are_printed_and_in_json(folder: Path) -> None:
    """run and trace show where measured times are off; trace needs a run first."""
    shutil.copy(folder / "plan.json", folder / "fresh.json")
    trace = ("trace", "fresh.json", "-o", "fresh-trace.json", "--deviations")
    refused(devplace(*trace, cwd=folder), 2, "devplace run fresh.json")
    done = devplace("run", "fresh.json", "--deviations", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Kinds of ops" in done.stdout
    assert "stood in for" in done.stdout
    done = devplace(*trace, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["measured"] is True
    assert data["deviations"]["step"]["measured_ns"] > 0
    assert {row["name"] for row in data["deviations"]["devices"]} == {"work", "wait"}
