"""Numbers over several processes are those of the unplaced step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.run.ranks.launch import launch
from tests.run.ranks.programs import STEPS, unplaced, workload_step

WORKLOADS = ("normed", "rnnlm", "nmt-2")
PLACERS = ("random", "even", "search")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Losses and state of the unplaced steps."""
    return {name: unplaced(*workload_step(name), STEPS) for name in WORKLOADS}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_give_the_numbers_of_the_unplaced_step(
    tmp_path: Any, expected: Any, size: int
) -> None:
    """Every process gets every loss, and rank 0 all state, bit for bit; each holds its part."""
    found = launch(tmp_path, size, "train", names=WORKLOADS, placers=PLACERS, devices=4)
    assert [one.code for one in found] == [0] * size, [one.output for one in found]
    for name in WORKLOADS:
        losses, state = expected[name]
        for placer in PLACERS:
            results = [one.value[name, placer] for one in found]
            for result in results:
                assert all(map(torch.equal, result["losses"], losses))
            first = results[0]["state"]
            assert first.keys() == state.keys()
            assert all(torch.equal(first[key], state[key]) for key in state)
            assert max(result["held"] for result in results) < len(state)


@pytest.mark.slow
def test_each_process_may_give_its_rows_alone(tmp_path: Any, expected: Any) -> None:
    """With `batch="sharded"` processes put the batch together; the numbers are the same."""
    found = launch(
        *(tmp_path, 2, "train"), names=["normed"], placers=["random"], devices=3, batch="sharded"
    )
    assert [one.code for one in found] == [0, 0], [one.output for one in found]
    losses, state = expected["normed"]
    for one in found:
        assert all(map(torch.equal, one.value["normed", "random"]["losses"], losses))
    first = found[0].value["normed", "random"]["state"]
    assert all(torch.equal(first[key], state[key]) for key in state)
