"""Training of the learned placer's weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devplace.placers.rl import weights

FOLDER = str(Path(__file__).parents[2] / "experiments")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with few updates between validations."""
    monkeypatch.syspath_prepend(FOLDER)
    import train_learned

    monkeypatch.setattr(train_learned, "EVERY", 2)
    monkeypatch.setattr(train_learned, "ROUNDS", 3)
    yield train_learned
    for name in ("train_learned", "learned_problems", "common"):
        sys.modules.pop(name, None)


def test_a_resumed_training_ends_as_one_that_was_not_stopped(training: Any, tmp_path: Path) -> None:
    """Stopped after 4 of 8 updates and resumed: the same policy, and weights that can be read."""
    from learned_problems import capture_small

    graphs = [capture_small("rnnlm", None, 1)]
    parts = {"train": graphs, "validation": graphs}

    def options(name: str) -> argparse.Namespace:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return argparse.Namespace(
            log_dir=folder,
            out=folder / "w.npz",
            seed=1,
            problems=2,
            held_out=1,
            provenance={"commit": "none"},
        )

    def policy_of(run: Any) -> list[float]:
        return [float(value.sum()) for value in run.policy.state_dict().values()]

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        whole = training.Run(1, 8)
        training.train(whole, options("whole"), parts)
        stopped = training.Run(1, 8)
        training.train(stopped, options("stopped"), parts, until=4)
        resumed = training.Run(1, 8)
        resumed.load(tmp_path / "stopped" / "checkpoint.pt")
        training.train(resumed, options("stopped"), parts)
    torch.set_num_threads(threads)
    assert resumed.update == whole.update == 8
    assert policy_of(resumed) == policy_of(whole)
    assert weights.read(tmp_path / "whole" / "w.npz")[1]["seed"] == 1
    assert (tmp_path / "stopped" / "curves.csv").read_text().count("\n") == 5


def test_the_teacher_is_never_worse_than_the_rule(training: Any) -> None:
    """Hill climbing starts from the untrained policy's placement and keeps only what is better."""
    from learned_problems import capture_small, draw

    sample = draw([capture_small("rnnlm", None, 1)], np.random.default_rng(3))
    found = training.lesson(sample, np.random.default_rng(0))
    score, _ = training.score(training.PairPolicy(), [sample])
    assert found.gain <= score
    assert found.actions.shape == (1, sample.scene.num_groups)
