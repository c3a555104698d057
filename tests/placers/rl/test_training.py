"""Seeds, curves, checkpoints, resuming, early stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.placers.rl.cases import curves, layered, logged, three_ops

from devplace.errors import InputError
from devplace.placers import Budget, Evaluator, PostPpo, place
from devplace.placers.rl.options import TrainingOptions


def test_nothing_is_written_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a run leaves no files."""
    monkeypatch.chdir(tmp_path)
    place(three_ops(), PostPpo(), "60ev", 0)
    assert list(tmp_path.iterdir()) == []


def test_curves_have_a_row_per_update(tmp_path: Path) -> None:
    """Rows count evaluations upwards; entropy, divergence, baseline and failures are there."""
    place(three_ops(), logged(PostPpo(), tmp_path), "100ev", 0)
    rows = curves(tmp_path)
    assert [row["evaluations"] for row in rows] == [20, 40, 60, 80, 100]
    assert {"entropy", "kl", "baseline", "failure_rate", "best_ns", "mean_ns"} <= set(rows[0])
    assert rows[-1]["best_ns"] == 28
    assert all(row["failure_rate"] == 0 for row in rows)


def test_runs_of_other_seeds_and_settings_have_other_folders(tmp_path: Path) -> None:
    """Hyper-parameters, seed and problem are told apart; the budget is not."""
    for seed, rate in ((0, 0.1), (1, 0.1), (0, 0.2)):
        place(three_ops(), logged(PostPpo(learning_rate=rate), tmp_path), "40ev", seed)
    place(three_ops(), logged(PostPpo(learning_rate=0.2), tmp_path), "60ev", 0)
    place(layered(2), logged(PostPpo(learning_rate=0.2), tmp_path), "40ev", 0)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_finished_run_can_be_continued(tmp_path: Path) -> None:
    """With a larger budget a resumed run does the rest only, and gives what one long run does."""
    place(layered(3), logged(PostPpo(), tmp_path / "a"), "100ev", 0)
    more = place(layered(3), logged(PostPpo(), tmp_path / "a", resume=True), "200ev", 0)
    whole = place(layered(3), logged(PostPpo(), tmp_path / "b"), "200ev", 0)
    assert more.placement.devices.tolist() == whole.placement.devices.tolist()
    assert more.evaluations == whole.evaluations == 200
    assert len(curves(tmp_path / "a")) == len(curves(tmp_path / "b"))


def test_without_resume_a_run_starts_anew(tmp_path: Path) -> None:
    """The same run again replaces its curves."""
    for _ in range(2):
        place(three_ops(), logged(PostPpo(), tmp_path), "60ev", 0)
        assert len(curves(tmp_path)) == 3


def test_a_run_that_stalls_ends_early() -> None:
    """Three ops are solved soon; 100 evaluations after the last improvement it stops."""
    placer = PostPpo(training=TrainingOptions(stall=100))
    found = place(three_ops(), placer, "5000ev", 0)
    assert found.step_ns == 28
    assert 100 <= found.evaluations < 400


def test_without_any_budget_it_ends_too() -> None:
    """`most` evaluations are made where neither seconds nor evaluations are limited."""
    evaluate = Evaluator(three_ops(), Budget())
    placer = PostPpo(training=TrainingOptions(most=60))
    placer(three_ops(), evaluate, np.random.default_rng(0))
    assert evaluate.num_evaluations == 60


def test_options_are_checked(tmp_path: Path) -> None:
    """Counts must be positive, resuming needs a folder, devices must exist, folders be writable."""
    with pytest.raises(InputError, match="stall must be at least 1, got 0"):
        TrainingOptions(stall=0)
    with pytest.raises(InputError, match="give the log_dir"):
        TrainingOptions(resume=True)
    for device in ("nowhere", "cuda:99", "auto", "meta"):
        with pytest.raises(InputError, match=f"cuda:1 and be there, got '{device}': "):
            place(three_ops(), PostPpo(training=TrainingOptions(device=device)), "20ev", 0)
    (tmp_path / "file").write_text("")
    placer = replace(PostPpo(), training=TrainingOptions(log_dir=tmp_path / "file" / "x"))
    with pytest.raises(InputError, match="Cannot write curves"):
        place(three_ops(), placer, "20ev", 0)
