"""Placers of the user's on the command line, as `file.py:function`."""

from __future__ import annotations

from pathlib import Path

import pytest

from devplace import placers
from devplace.cli.planning import _placer
from devplace.errors import InputError
from devplace.testing import hand_machine, hand_problem

OWN = """
from devplace import Placement
from devplace.placers import Single

class Mine:
    name = "mine"
    def supports(self, problem):
        return ""
    def __call__(self, problem, evaluate, rng):
        print("placing")
        return Placement((0,) * len(problem.graph.ops))

class Number(Mine):
    def __call__(self, problem, evaluate, rng):
        return 7

class Raises(Mine):
    def __call__(self, problem, evaluate, rng):
        raise KeyError("weights")

class Exits(Mine):
    def __call__(self, problem, evaluate, rng):
        raise SystemExit(0)

class Asked(Mine):
    def supports(self, problem):
        raise ValueError("no idea")

def known():
    return Single()
"""
PROBLEM = hand_problem("x = input bytes=1\ny = f(x) bytes=1 ns=5", hand_machine({"cuda:0": 100}))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_what_it_prints_goes_to_stderr(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is for results. Placers of the package stay what they are."""
    result = placers.place(PROBLEM, _placer(f"{own}:Mine"), "5ev")
    assert (result.placer, result.step_ns) == ("mine", 5)
    told = capsys.readouterr()
    assert "placing" in told.err
    assert not told.out
    assert isinstance(_placer(f"{own}:known"), placers.Single)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Number", "must give a devplace.Placement, got 7"),
        ("Raises", r"own.py:19: KeyError: 'weights' \(while placing\)"),
        ("Exits", "own.py:23: SystemExit: it exits with 0"),
        ("Asked", "own.py:27: ValueError: no idea"),
    ],
)
def test_its_errors_are_bad_input(own: Path, name: str, says: str) -> None:
    """They name the user's file and line, exits among them."""
    with pytest.raises(InputError, match=says):
        placers.place(PROBLEM, _placer(f"{own}:{name}"), "5ev")
