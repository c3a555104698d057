"""Adapters of peft, where it is installed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import devplace as dp
from tests.run.models import mean_square

peft = pytest.importorskip("peft")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_adapters_train_as_in_the_ordinary_loop() -> None:
    """Only they do; the frozen weights stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"])
    model = peft.get_peft_model(model, config).double()
    twin = copy.deepcopy(model)
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
        for each in (model, twin)
    ]
    data = [torch.randn(6, 8).double() for _ in range(3)]
    options = {"machine": 2, "budget": "30ev,60s", "confirm": False}
    with dp.parallelize(model, data[0], mean_square, optimizers[0], **options) as step:
        for x in data:
            optimizers[1].zero_grad()
            expected = mean_square(twin, x)
            expected.backward()
            optimizers[1].step()
            assert float(step(x)) == pytest.approx(float(expected.detach()), abs=1e-9)
        step.sync()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
