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


@pytest.mark.parametrize("name", ["rnnlm", "nmt-2", "gpt-2"])
@pytest.mark.parametrize("size", [pytest.param(k, marks=gpus.needs_apart(k)) for k in (2, 4)])
def test_processes_with_gpus_give_the_numbers_of_one(tmp_path: Any, name: str, size: int) -> None:
    """Random placements, in CUDA graphs with NCCL's sends and receives; dropout included."""
    found = launch(tmp_path, size, "train_on_gpus", name=name)
    assert [one.code for one in found] == [0] * size, [one.output for one in found]
    assert {one.value["mode"] for one in found} == {"graph"}, [one.value for one in found]
    losses, state = found[0].value["expected"]
    for one in found:
        torch.testing.assert_close(one.value["losses"], losses, rtol=ROUNDING, atol=0.0)
    for key, value in found[0].value["state"].items():
        scale = float(state[key].abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            value.cpu(), state[key], rtol=0.0, atol=ROUNDING * max(scale, 1e-6)
        )
