"""Theme L: limits and user input ignored or half understood."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import random_problem
from tests.user_threads.helpers import captured, sgd, where
from tests.user_threads.machines import equal
from torch import nn

from devplace.errors import InfeasibleError
from devplace.placers import ALL, Placer, place
from devplace.problem import Problem
from devplace.testing import hand_machine


@pytest.mark.parametrize("placer", [placer() for placer in ALL], ids=lambda placer: placer.name)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    limits=st.lists(st.integers(0, 20_000), min_size=3, max_size=3),
)
def test_s57_limits_are_never_exceeded(placer: Placer, seed: int, limits: list[int]) -> None:
    """Random limits on random graphs: every peak is within its limit, or the answer is that it
    does not fit."""
    random = random_problem(seed, 15, 3)
    names = random.machine.device_names
    machine = hand_machine(dict.fromkeys(names, 10**9))
    problem = Problem(
        random.graph, machine, random.costs, limits=dict(zip(names, limits, strict=True))
    )
    if placer.supports(problem):
        return
    try:
        result = place(problem, placer, "100ev")
    except InfeasibleError as refused:
        missing = refused.missing_bytes
    else:
        missing = {}
        assert set(result.plan.predicted.peak_bytes) == set(names)
        assert (result.timeline.peak_bytes <= limits).all()
    assert all(lacking > 0 for lacking in missing.values())


class Scaled(nn.Module):
    """A block with its own scalar parameter and buffer beside two submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.zeros(8))
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two products, scaled and shifted."""
        return self.second(torch.relu(self.first(x))) * self.scale + self.shift


class Root(nn.Module):
    """A parameter at the root beside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks, then the root's own parameter."""
        for block in self.blocks:
            x = block(x)
        return x + self.bias


def test_s59_every_parameter_and_op_has_one_place() -> None:
    """With the cut inside a block, parameters of the block itself and of the root are placed too,
    and every op is in exactly one device's order."""
    model = Root()
    pins = {"blocks.0.first": "cuda:0", "blocks.0.second": "cuda:1"}
    problem = captured(model, (torch.zeros(4, 8),), equal(2, 10**9), sgd(model), pins=pins)
    result = place(problem, ALL[0](), "9ev")
    device = where(result)
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        assert device[name] in ("cuda:0", "cuda:1"), name
    assert device["blocks.0.first.weight"] == "cuda:0"
    assert device["blocks.0.second.weight"] == "cuda:1"
    ordered = sorted(op for row in result.plan.order for op in row)
    work = [i for i, op in enumerate(problem.graph.ops) if not (op.is_source or op.is_view)]
    assert ordered == work
