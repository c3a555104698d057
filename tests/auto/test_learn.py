"""Constants learnt once and kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devplace.auto.learn import kept_calibration, learn
from devplace.problem import Problem
from tests.auto.test_calibration import START, TRUE, machine, observations


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a computer with a driver."""
    monkeypatch.setattr("devplace.run.probe._driver_version", lambda: "1.0")
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path))
    return tmp_path


def rows(count: int, mode: str = "graph") -> list[Any]:
    """Measured plans with their problems."""
    found = []
    for one in observations(count):
        plan = SimpleNamespace(placement=one.placement, order=one.order)
        row = SimpleNamespace(
            plan=plan,
            measured_ns=one.measured_ns,
            candidate=SimpleNamespace(devices=("cuda:0", "cuda:1")),
            measurement=SimpleNamespace(timing=SimpleNamespace(mode=mode)),
        )
        found.append((row, Problem(one.graph, one.machine, one.costs)))
    return found


def test_constants_are_learnt_once_and_kept(folder: Path) -> None:
    """The first time they are fitted and written; then the kept ones stand."""
    assert kept_calibration(machine()) is None
    found = learn(machine(), rows(6), START)
    assert found is not None
    assert kept_calibration(machine()) == found
    assert learn(machine(), rows(6), START) is None
    assert len(list(folder.iterdir())) == 1


def test_what_cannot_be_bettered_is_not_kept(folder: Path) -> None:
    """Constants that are right already leave nothing to keep."""
    assert learn(machine(), rows(5), TRUE) is None
    assert list(folder.iterdir()) == []


def test_few_or_eager_plans_teach_nothing(folder: Path) -> None:
    """Fewer than four plans, or plans run op by op, are not fitted to."""
    assert learn(machine(), rows(3), START) is None
    assert learn(machine(), rows(6, mode="eager"), START) is None


def test_a_damaged_file_counts_as_none(folder: Path) -> None:
    """A changed calibration is not used."""
    learn(machine(), rows(6), START)
    (path,) = folder.iterdir()
    path.write_text(path.read_text().replace("engine_factor", "engine_faktor"))
    assert kept_calibration(machine()) is None
