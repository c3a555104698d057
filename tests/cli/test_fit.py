"""`devplace fit` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.runner import MLP, devplace, refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model file."""
    (tmp_path / "mlp.py").write_text(MLP)
    return tmp_path


@pytest.mark.slow
def test_json_says_whether_and_how_it_fits(folder: Path) -> None:
    """A tiny step fits one GPU as it is; stdout is one JSON value with integers."""
    done = devplace("fit", "mlp.py:build", "--machine", "k40x2", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is True
    assert found["rows"] == 6
    assert found["devices"] == ["cuda:0", "cuda:1"]
    first = found["ways"][0]
    assert (first["fits"], first["recompute"], first["micro_batches"]) == (True, False, 1)
    assert first["devices"] == ["cuda:0"]
    assert first["missing_bytes"] == {}
    assert first["step_ns"] == found["whole_ns"]
    assert "repeats nothing" in found["ways"][1]["reason"]
    assert found["verdict"] == "fits on 1 of 2 GPUs"


@pytest.mark.slow
def test_what_fits_nowhere_is_exit_3(folder: Path) -> None:
    """The last line says what is missing, where, and what to do."""
    limits = ("--limit", "cuda:0=100")
    done = devplace("fit", "mlp.py:build", "--machine", "k40x1", *limits, cwd=folder)
    refused(done, 3, "does not fit", "on cuda:0", "Lower the batch size")


@pytest.mark.slow
def test_cards_are_compared(folder: Path) -> None:
    """One row per machine; that some do not fit is no error."""
    limits = ("--limit", "cuda:0=100")
    machines = ("--cards", "k40,k40x2")
    done = devplace("fit", "mlp.py:build", *machines, *limits, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["machines"]
    assert [(each["machine"], each["fits"]) for each in found] == [("k40", False), ("k40x2", True)]


@pytest.mark.slow
def test_bad_input_is_refused(folder: Path) -> None:
    """Unknown machines, and files that are graphs already, without a traceback."""
    refused(devplace("fit", "mlp.py:build", "--cards", "k40,none", cwd=folder), 2, "none")
    refused(devplace("fit", "model.pt2", cwd=folder), 2, "devplace plan")
