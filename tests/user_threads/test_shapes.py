"""Theme P: models that are no chain."""

from __future__ import annotations

import pytest
import torch
from tests.user_threads.helpers import captured, sgd, where
from tests.user_threads.machines import equal
from torch import nn

from devplace.placers import Even, Search, place
from devplace.testing import brute_force, hand_machine, hand_problem


class Skips(nn.Module):
    """Blocks with skips over one and over three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stages = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every stage adds its input, every third also that of three stages before."""
        x = torch.relu(self.stem(x))
        past = [x]
        for k, stage in enumerate(self.stages):
            x = x + torch.relu(stage(x))
            if k % 3 == 2:
                x = x + past[k - 2]
            past.append(x)
        return x


@pytest.mark.parametrize("placer", [Even(), Search()], ids=lambda placer: placer.name)
def test_s76_skips_over_stages_are_legal(placer: Even | Search) -> None:
    """A residual network with long skips is planned over four devices; what a skip needs crosses
    at most once per device."""
    model = Skips()
    problem = captured(model, (torch.zeros(2, 3, 8, 8),), equal(4, 10**9), sgd(model))
    result = place(problem, placer, "600ev")
    assert result.is_feasible
    if placer.name == "even":
        assert len(set(result.placement.devices.tolist())) == 4
    moved = [(t.tensor, t.dst) for t in result.timeline.transfers]
    assert len(moved) == len(set(moved))


def test_s77_the_cut_of_a_u_net_is_symmetric_on_a_slow_link() -> None:
    """Skips shrink with depth: on two devices that cannot hold all, the outer level is on one
    device, the inner levels on the other."""
    text = """
        w_outer = parameter bytes=40
        w_inner = parameter bytes=160
        x = input bytes=1
        e0 = conv(x, w_outer) bytes=64 ns=10 workspace_bytes=100 module=e0
        d0_in = pool(e0) bytes=8 ns=1 module=e0
        e1 = conv(d0_in, w_inner) bytes=16 ns=10 module=e1
        e1_in = pool(e1) bytes=2 ns=1 module=e1
        mid = conv(e1_in) bytes=2 ns=10 module=mid
        d1 = up(mid, e1) bytes=8 ns=10 module=d1
        d0 = up(d1, e0) bytes=64 ns=10 module=d0 result=output
        keep_outer = use(w_outer, d0) bytes=40 ns=1 replaces=w_outer
        keep_inner = use(w_inner, d1) bytes=160 ns=1 replaces=w_inner
    """
    machine = hand_machine({"cuda:0": 340, "cuda:1": 340}, bytes_per_ns=0.05)
    problem = hand_problem(text, machine)
    device = where(place(problem, Search(), "4000ev"))
    assert device["e0"] == device["d0"]
    assert device["e1"] == device["d1"] == device["mid"]
    assert device["e0"] != device["e1"]
    assert place(problem, Search(), "4000ev").step_ns <= brute_force(problem).step_ns


def test_s80_a_plan_lists_the_whole_content_of_each_device() -> None:
    """No cut points: each device has its list of ops, together they are all ops, none twice."""
    model = Skips()
    problem = captured(model, (torch.zeros(2, 3, 8, 8),), equal(2, 10**9), sgd(model))
    plan = place(problem, Even(), "9ev").plan
    listed = [op for row in plan.order for op in row]
    assert len(listed) == len(set(listed))
    for device, row in enumerate(plan.order):
        assert all(plan.placement[op] == device for op in row)
    first = problem.graph.op_index["stem.weight"]
    assert plan.placement[first] == 0
