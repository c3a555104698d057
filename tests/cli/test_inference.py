"""A Python model without a loss, and a placer of the user's, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.runner import devplace, refused

FILE = """
import numpy as np
import torch
from devplace.problem import Placement

def build():
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers).eval(), (torch.randn(6, 8),)

class Last:
    name = "last"
    def supports(self, problem):
        return ""
    def __call__(self, problem, evaluate, rng):
        return Placement(np.full(len(problem.graph.ops), problem.usable_devices[-1], np.int32))

def number():
    return 3
"""
QUICK = ("--machine", "cpux2", "--budget", "20ev")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FILE)
    return tmp_path


@pytest.mark.slow
def test_an_inference_is_planned_with_a_placer_of_the_users_and_run(folder: Path) -> None:
    """The graph has no update, the plan is the placer's, and a run has outputs but no losses."""
    done = devplace(
        *("plan", "net.py:build", *QUICK, "--placer", "net.py:Last", "-o", "plan.json"), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "placer       last" in done.stdout
    assert "costs        analytic: no op was timed" in done.stdout
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["order"]["cpu:0"] == []
    done = devplace("run", "plan.json", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["results"], data["losses"], data["bit_equal"]) == (1, [], True)


@pytest.mark.slow
def test_what_is_no_placer_is_refused(folder: Path) -> None:
    """A function that gives something else, and one that is not there."""
    compare = ("compare", "net.py:build", *QUICK, "--placers")
    for name, words in (("number", "gave 3, which is no placer"), ("Lost", "'Lost'")):
        refused(devplace(*compare, f"net.py:{name}", cwd=folder), 2, words)
