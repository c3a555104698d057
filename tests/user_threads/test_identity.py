"""Devices are known by identity, and random ops are never recomputed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import devplace as dp
from devplace.errors import PlanMismatchError
from devplace.machine import Machine
from devplace.testing import hand_graph

STEP = """
    x = input bytes=4
    a = aten.relu.default(x) bytes=4 result=output
"""


def _with_uuids(machine: Machine, uuids: dict[str, str]) -> Machine:
    devices = [
        msgspec.structs.replace(device, uuid=uuids.get(device.name, ""))
        for device in machine.devices
    ]
    return replace(machine, devices=tuple(devices))


def _problem(machine: Machine) -> dp.Problem:
    graph = hand_graph(STEP)
    return dp.Problem(graph, machine, dp.Analytic()(graph, machine))


def test_s29_plan_is_refused_when_the_visible_cards_are_in_another_order() -> None:
    """A plan made for two detected cards does not run on the same names with the cards swapped."""
    plain = dp.load_machine("k40x2")
    here = _with_uuids(plain, {"cuda:0": "GPU-a", "cuda:1": "GPU-b"})
    swapped = _with_uuids(plain, {"cuda:0": "GPU-b", "cuda:1": "GPU-a"})
    plan = dp.place(_problem(here), dp.placers.Single(), "9ev").plan
    plan.check(_problem(here))
    with pytest.raises(PlanMismatchError, match="another machine"):
        plan.check(_problem(swapped))


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.layer(x), 0.5)

        return checkpoint(part, x, use_reentrant=False)


def test_s52_recomputing_a_random_op_draws_the_same() -> None:
    """Dropout in a checkpointed part has one mask in both passes, on any device."""
    model = _Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    graph = dp.capture(model, (x, torch.randn(2, 4)), nn.MSELoss(), optimizer)
    drawn = list(graph.program.random_ops.values())
    assert drawn == [0] * len(drawn)
