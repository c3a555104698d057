"""`dp.parallelize` by several processes: the first one plans, all have its plan and prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.run.models import Residual, mean_square
from tests.run.placed import train_eager
from tests.run.ranks.launch import launch
from tests.run.ranks.programs import STEPS


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["whole", "sharded"])
def test_the_first_process_plans_for_all(tmp_path: Any, batch: str) -> None:
    """Plan, prices and losses are the same everywhere, weights those of rank 0, as in eager."""
    found = launch(tmp_path, 2, "parallel", batch=batch)
    assert [one.code for one in found] == [0, 0], [one.output for one in found]
    first, second = (one.value for one in found)
    for key in ("losses", "placement", "prices"):
        assert first[key] == second[key]
    assert len(set(first["placement"])) == 2
    torch.manual_seed(0)
    model, inputs = Residual(8), torch.linspace(-1, 1, 96).reshape(12, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train_eager(model, optimizer, [(inputs,)] * STEPS, mean_square)
    assert first["losses"] == pytest.approx(losses, rel=1e-5)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(first["weights"][name], weight)
    assert len(first["momentum"]) == 4
    assert second["momentum"] == []
