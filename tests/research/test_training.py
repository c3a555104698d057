"""Seeds, curves, checkpoints, resuming, early stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from devplace.errors import CheckpointError, InputError
from devplace.placers import Budget, Evaluator, PostPpo, place
from devplace.research import curves as rl_curves
from devplace.research.options import TrainingOptions
from tests.research.cases import curves, layered, logged, three_ops
from tests.research.test_systems import small


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


@pytest.mark.parametrize("name", ["post-ppo", "colocrl", "hdp", "placeto", "mars"])
def test_a_budget_that_ends_within_an_update_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """A run whose last update was cut, and then goes on, is one long run: history and curves."""
    problem, parts = layered(2), []
    for folder, budgets in (("a", ("47ev", "93ev")), ("b", ("93ev",))):
        for budget in budgets:
            placer = logged(small(name), tmp_path / folder, resume=True)
            found = place(problem, placer, budget, 0)
        rows = [{**row, "seconds": 0} for row in curves(tmp_path / folder)]
        parts.append((found.placement.devices.tolist(), [h[::2] for h in found.history], rows))
    assert parts[0] == parts[1]


def test_a_measured_run_is_another_run(tmp_path: Path) -> None:
    """Simulated steps are not taken for measured ones where a measured run is to go on."""
    place(three_ops(), logged(PostPpo(), tmp_path), "40ev", 0)
    measured = logged(PostPpo(), tmp_path, resume=True)
    found = place(three_ops(), measured, "80ev", 0, measure=lambda placement: 10**6)
    assert found.history[-1][2] == 10**6
    assert "no checkpoint of this run" in found.notes[0]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"KPK\x03", "other problem", "no generator", "one bit"]
)
def test_a_checkpoint_of_something_else_is_refused(content: bytes | str, tmp_path: Path) -> None:
    """Empty, damaged, incomplete, of another problem: the error names the file and what to do."""
    place(three_ops(), logged(PostPpo(), tmp_path / "a"), "40ev", 0)
    (path,) = (tmp_path / "a").glob("*/checkpoint.pt")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "other problem":
        place(three_ops(memory=90), logged(PostPpo(), tmp_path / "b"), "40ev", 0)
        (other,) = (tmp_path / "b").glob("*/checkpoint.pt")
        path.write_bytes(other.read_bytes())
    elif content == "one bit":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        state = torch.load(path, weights_only=True)
        del state["generator"]
        torch.save(state, path)
    with pytest.raises(
        CheckpointError, match=r"Cannot resume from .*checkpoint\.pt.*delete the file"
    ):
        place(three_ops(), logged(PostPpo(), tmp_path / "a", resume=True), "80ev", 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "evaluations,seconds,\n",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("20,", "x,", 1),
        lambda text: text.replace(",", ";", 1),
        lambda text: text.replace("entropy", "seconds"),
        lambda text: text.replace("entropy", "other"),
        lambda text: "\udcff" + text,
        lambda text: "\n" * 100,
    ],
    ids=[
        "empty",
        "no-rows",
        "cut",
        "no-number",
        "short",
        "twice",
        "other-columns",
        "not-utf8",
        "blank",
    ],
)
def test_damaged_curves_are_named(change: Callable[[str], str], tmp_path: Path) -> None:
    """Rows that a checkpoint counts on must be there, whole, and numbers."""
    place(three_ops(), logged(PostPpo(), tmp_path), "60ev", 0)
    (path,) = tmp_path.glob("*/curves.csv")
    path.write_text(change(path.read_text()), errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"curves\.csv.*delete the folder"):
        place(three_ops(), logged(PostPpo(), tmp_path, resume=True), "120ev", 0)


def test_half_a_row_behind_a_checkpoint_is_dropped(tmp_path: Path) -> None:
    """A kill may leave one: the checkpoint does not count on it."""
    place(three_ops(), logged(PostPpo(), tmp_path), "60ev", 0)
    (path,) = tmp_path.glob("*/curves.csv")
    path.write_text(f"{path.read_text()}80,0.1")
    place(three_ops(), logged(PostPpo(), tmp_path, resume=True), "100ev", 0)
    assert [row["evaluations"] for row in curves(tmp_path)] == [20, 40, 60, 80, 100]


def test_a_full_disk_ends_curves_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is given; a note says since when nothing is written."""

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    training = PostPpo(training=TrainingOptions(log_dir=tmp_path, checkpoint_every=20))
    whole = place(three_ops(), PostPpo(), "100ev", 0)
    with monkeypatch.context() as patch:
        writes = iter([os.fsync] * 2)
        patch.setattr(os, "fsync", lambda handle: next(writes, fail)(handle))
        found = place(three_ops(), training, "100ev", 0)
    assert found.placement.devices.tolist() == whole.placement.devices.tolist()
    assert any("No space left" in note for note in found.notes)


def test_tensorboard_keeps_what_came_before_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are evaluations, and so is the one from which an older run's rows are hidden."""
    purged = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            purged.append(purge_step)

        def add_scalar(self, name: str, value: float, step: int) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(rl_curves, "find_spec", lambda name: object())
    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    place(three_ops(), logged(PostPpo(), tmp_path), "60ev", 0)
    place(three_ops(), logged(PostPpo(), tmp_path, resume=True), "100ev", 0)
    assert purged == [None, 61]


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
    assert evaluate.meter.num_evaluations == 60


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
