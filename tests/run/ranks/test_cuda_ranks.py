"""Several processes with a GPU each give the numbers of the unplaced step on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.run import gpus
from tests.run.ranks.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
# Another kernel for a tensor that a transfer has made dense may round in another order.
ROUNDING = 1e-5


@pytest.mark.parametrize("transport", ["shared memory", "nccl"])
@pytest.mark.parametrize("name", ["rnnlm", "nmt-2", "gpt-2"])
@pytest.mark.parametrize("size", [pytest.param(k, marks=gpus.needs_apart(k)) for k in (2, 4)])
def test_processes_with_gpus_give_the_numbers_of_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, size: int, transport: str
) -> None:
    """Random placements, in CUDA graphs, by either transport; dropout included."""
    if transport == "nccl":
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = launch(tmp_path, size, "train_on_gpus", name=name)
    assert_numbers(found, transport)


@gpus.needs_apart(2)
@pytest.mark.parametrize("transport", ["shared memory", "nccl"])
def test_a_step_of_many_messages_ends(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """A full-sized step, with some hundred messages among ops that take as long as they do."""
    if transport == "nccl":
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = launch(tmp_path, 2, "train_on_gpus", name="nmt-4", size="full")
    assert_numbers(found, transport)


def assert_numbers(found: list[Any], transport: str) -> None:
    """All processes ran in graphs by that transport, with the numbers of the unplaced step."""
    assert [one.code for one in found] == [0] * len(found), [one.output for one in found]
    assert {one.value["mode"] for one in found} == {"graph"}, [one.value for one in found]
    assert {one.value["transport"] for one in found} == {transport}
    losses, state = found[0].value["expected"]
    for one in found:
        torch.testing.assert_close(one.value["losses"], losses, rtol=ROUNDING, atol=0.0)
    for key, value in found[0].value["state"].items():
        scale = float(state[key].abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            value.cpu(), state[key], rtol=0.0, atol=ROUNDING * max(scale, 1e-6)
        )


@gpus.needs_apart(2)
@pytest.mark.parametrize("transport", ["shared memory", "nccl"])
def test_a_process_that_dies_frees_the_gpus_of_others(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """What waits on a GPU for the one that is gone ends, and the error names it."""
    if transport == "nccl":
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = launch(tmp_path, 2, "end_on_gpus", timeout_s=20.0)
    assert "rank 1" in found[0].value["told"], (found[0].error, found[0].output)
