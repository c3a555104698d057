"""Kernels that abort on made-up values, and indices of all kinds, through `parallelize`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import devplace as dp
from tests.cost import hostile_ops as hostile
from tests.cost.test_remote import messages, recommender

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path))


@pytest.mark.parametrize("confirm", [False, True])
@pytest.mark.slow
def test_a_kernel_that_aborts_costs_one_line_of_the_report(confirm: bool) -> None:
    """It aborts on made-up numbers, never on real ones: planned, measured, equal to eager."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x: Any) -> Any:
            return self.layers(hostile.roots(x.exp().clamp(min=1)))

    model, batch = Rooted().eval(), torch.randn(5, 8)
    with dp.parallelize(model, batch, machine=2, budget="100ev,1200s", confirm=confirm) as step:
        lines = [line for line in str(step).splitlines() if "SIGABRT" in line]
        assert len(lines) == 1
        assert "devplace_hostile.roots" in lines[0]
        with torch.no_grad():
            assert torch.equal(step(batch), model(batch))


@pytest.mark.parametrize("case", [lambda: recommender("sum"), messages])
@pytest.mark.slow
def test_models_with_indices_of_all_kinds_train(case: Any) -> None:
    """Their ops are timed without a complaint, and two steps give eager's losses."""
    model, batch = case()
    eager = copy.deepcopy(model)
    expected, optimizer = [], torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = eager(*batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dp.parallelize(model, batch, None, optimizer, machine=2, budget="100ev,1200s") as step:
        assert "estimated" not in str(step)
        assert [step(*batch).item() for _ in range(2)] == pytest.approx(expected, rel=1e-5)
