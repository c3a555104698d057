"""Checkpoints of several processes: what each holds, loaded by any other number, or by PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.run.ranks.launch import launch
from tests.run.ranks.programs import go_on, state_of, unplaced, workload_step

BEFORE, AFTER = 3, 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> str:
    """A checkpoint of two processes after three steps."""
    folder = tmp_path_factory.mktemp("saved")
    path = str(folder / "checkpoint")
    found = launch(folder, 2, "save_after", steps=BEFORE, where=path)
    assert [one.code for one in found] == [0, 0], [one.output for one in found]
    return path


@pytest.fixture(scope="module")
def expected() -> Any:
    """Losses and state of five steps without a break."""
    return unplaced(*workload_step("normed"), BEFORE + AFTER)


def test_another_number_of_processes_goes_on(tmp_path: Any, saved: str, expected: Any) -> None:
    """Three processes by another plan give what a run without a break gives, dropout included;
    `sync(everywhere=True)` leaves it in each of them."""
    found = launch(tmp_path, 3, "go_on", steps=AFTER, where=saved)
    assert [one.code for one in found] == [0] * 3, [one.output for one in found]
    losses, state = expected
    for one in found:
        assert all(map(torch.equal, one.value["losses"], losses[BEFORE:]))
        assert all(torch.equal(one.value["state"][key], state[key]) for key in state)


def test_one_process_goes_on(saved: str, expected: Any) -> None:
    """So does a single process that drives all devices."""
    found = go_on(AFTER, saved)
    losses, state = expected
    assert all(map(torch.equal, found["losses"], losses[BEFORE:]))
    assert all(torch.equal(found["state"][key], state[key]) for key in state)


def test_plain_pytorch_loads_it(saved: str) -> None:
    """Model and optimizer of a script without devplace have the state after three steps."""
    graph, _ = workload_step("normed")
    parts = get_state_dict(graph.model, graph.optimizer)
    state = dict(zip(("model", "optimizer"), parts, strict=True))
    checkpoint.load(state, checkpoint_id=saved)
    set_state_dict(
        *(graph.model, graph.optimizer),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    _, wanted = unplaced(*workload_step("normed"), BEFORE)
    loaded = state_of(graph)
    assert all(torch.equal(loaded[key], wanted[key]) for key in wanted)
    assert {int(s["step"]) for s in graph.optimizer.state.values()} == {BEFORE}
