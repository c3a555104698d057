"""Data and pipeline parallel steps over two processes equal the step of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from experiments.gpu.stages import blocks_per_stage
from experiments.gpu.training import Settings

from experiments.gpu import rows

NAMES = ["ddp", "fsdp", "1f1b-4", "zero-bubble-4", "zbv-4"]
# Older versions let a V schedule send to its own process at the start, which gloo cannot.
SENDS_TO_ITSELF = torch.__version__ < "2.13"


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["bert-large", "llama"])
def test_losses_are_those_of_one_process(tmp_path: Path, workload: str) -> None:
    """First and last loss of every row agree with the eager step of one process."""
    settings = dict(size="small", device="cpu", layers=5, steps=3)
    settings |= {"optimizer": "adamw"} if workload == "llama" else {"dropout": 0.0}
    one = Settings(workload, seconds=30.0, **settings)  # type: ignore[arg-type]
    eager = rows.run_row("experiments.gpu.eager", one, tmp_path / "eager.json")
    names = [name for name in NAMES if not (SENDS_TO_ITSELF and name.startswith("zbv"))]
    two = Settings(workload, gpus=2, **settings)  # type: ignore[arg-type]
    extra = ["--rows", ",".join(names)]
    group = rows.run_row("experiments.gpu.group", two, tmp_path / "group.json", extra)
    assert [row["row"] for row in group["rows"]] == names
    for row in group["rows"]:
        assert row["status"] == "ok", row
        assert row["first_loss"] == pytest.approx(eager["first_loss"], rel=1e-5)
        assert row["last_loss"] == pytest.approx(eager["last_loss"], rel=1e-4)
    assert eager["last_loss"] < eager["first_loss"]


@pytest.mark.slow
def test_rows_after_a_failed_one_are_measured(tmp_path: Path) -> None:
    """A row that fails is written with its reason, and the next runs in new processes."""
    settings = Settings("gpt-2", size="small", device="cpu", layers=1, dropout=0.0, steps=2, gpus=2)
    extra = ["--rows", "zbv-4,1f1b-4"]
    done = rows.run_row("experiments.gpu.group", settings, tmp_path / "group.json", extra)["rows"]
    assert done[0]["reason"] == "ValueError: 1 blocks are too few for 4 stages"
    assert done[1]["status"] == "ok", done
    one = dataclasses.replace(settings, gpus=1)
    eager = rows.run_row("experiments.gpu.eager", one, tmp_path / "eager.json")
    assert done[1]["first_loss"] == pytest.approx(eager["first_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("blocks", "owners", "head"),
    [
        (24, [0, 1, 2, 3], 2.5),
        (24, [0, 1, 2, 3, 0, 1, 2, 3], 2.5),
        (24, [0, 1, 2, 3, 3, 2, 1, 0], 2.5),
        (12, [0, 1, 2, 3, 3, 2, 1, 0], 1.5),
    ],
)
def test_blocks_are_spread_by_work(blocks: int, owners: list[int], head: float) -> None:
    """Devices differ by one block at most, the head counted; only the last stage may be empty."""
    counts = blocks_per_stage(blocks, owners, head)
    work = [0.0] * (max(owners) + 1)
    for count, owner in zip(counts, owners, strict=True):
        work[owner] += count
    work[owners[-1]] += head
    assert sum(counts) == blocks
    assert min(counts[:-1]) >= 1
    assert max(work) - min(work) <= 1


def test_a_heavy_head_has_the_last_stage_alone() -> None:
    """A head that outweighs the other devices' blocks gets no block."""
    assert blocks_per_stage(12, [0, 1, 2, 3], 4.4) == [4, 4, 4, 0]


def test_too_few_blocks_are_refused() -> None:
    """Every stage but the last needs a block."""
    with pytest.raises(ValueError, match="2 blocks are too few for 4 stages"):
        blocks_per_stage(2, [0, 1, 0, 1], 1.0)
