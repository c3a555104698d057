"""Theme M: out of memory with free memory elsewhere, or needless spill to slow memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.user_threads.helpers import captured, chain, mlp, priced, sgd, where
from tests.user_threads.machines import equal, mcpu, muni
from torch import nn

from devplace.errors import InfeasibleError
from devplace.machine import load_machine
from devplace.placers import Even, Greedy, Search, Single, place
from devplace.placers.orders import in_trace_order
from devplace.placers.simple.single import all_on
from devplace.problem import Problem
from devplace.report.memory import memory_rows
from devplace.simulator import simulate
from devplace.testing import brute_force, hand_machine, hand_placement, hand_problem


def test_s01_the_whole_step_is_planned_not_the_weights() -> None:
    """Kept activations three times the weights: two devices whose memory the weights would fill
    to 90 % are refused, or spread over more devices so that every peak is within its limit."""
    width, batch = 16, 200
    model = mlp(width, 4)
    weights = sum(p.numel() * 4 for p in model.parameters())
    optimizer = sgd(model)
    tight = captured(model, (torch.zeros(batch, width),), equal(2, int(weights / 0.9)), optimizer)
    with pytest.raises(InfeasibleError):
        place(tight, Search(), "500ev")
    one = place(tight, Single(), "9ev", allow_infeasible=True)
    peak = int(one.timeline.peak_bytes.max())
    assert peak > 3 * weights
    room = captured(model, (torch.zeros(batch, width),), equal(2, int(peak * 0.75)), optimizer)
    result = place(room, Search(), "1500ev")
    assert (result.timeline.peak_bytes <= int(peak * 0.75)).all()
    assert len(set(result.placement.devices.tolist())) == 2


@pytest.mark.parametrize("sizes", [(1, 1, 20, 1, 1), (20, 1, 1, 1, 1), (3, 4, 20, 2, 1)])
def test_s02_one_large_layer_does_not_empty_the_gpu(sizes: tuple[int, ...]) -> None:
    """Small layers behind one that does not fit still go to the accelerator: equal to brute
    force."""
    problem = hand_problem(chain(sizes, "1,20", 0), mcpu(5))
    assert place(problem, Search(), "3000ev").step_ns == brute_force(problem).step_ns


@pytest.mark.parametrize("unit", [100, 25])
def test_s03_a_large_embedding_spills_nothing_to_the_cpu(unit: int) -> None:
    """Embedding and head of 5, 32 layers of 0.05 and 0.4, eight cards of 10: no CPU entry; the
    same with weights packed to a quarter."""
    sizes = [5 * unit, *[unit // 20, unit * 2 // 5] * 16, 5 * unit]
    names = {f"cuda:{k}": 10 * unit for k in range(8)}
    machine = hand_machine({**names, "cpu:0": 10**6}, speed=dict.fromkeys(names, 20))
    problem = hand_problem(chain(sizes, ",".join(["5"] * 8 + ["100"])), machine)
    for placer in (Search(), Greedy(), Even()):
        result = place(problem, placer, "500ev")
        assert "cpu:0" not in where(result).values(), placer.name


class LanguageModel(nn.Module):
    """An embedding, small blocks and a head over a vocabulary much larger than the width."""

    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return self.head(hidden)


def test_s04_the_head_is_dearer_than_the_embedding() -> None:
    """Equal parameters, but the head's activations grow with the vocabulary: an even split, and
    filling devices of too little memory, give the head's device fewer blocks than the
    embedding's."""
    model = LanguageModel(512, 16, 4)
    optimizer = sgd(model)
    inputs = (torch.zeros(32, 16, dtype=torch.long),)
    roomy = captured(model, inputs, equal(2, 10**9), optimizer)
    peak = int(place(roomy, Single(), "9ev").timeline.peak_bytes.max())
    tight = priced(roomy.graph, equal(2, int(peak * 0.97)))
    for problem, placer in ((roomy, Even()), (tight, Greedy())):
        device = where(place(problem, placer, "99ev"))
        assert device["embed.weight"] != device["head.weight"]
        beside = [device[f"blocks.{k}.weight"] == device["head.weight"] for k in range(4)]
        assert sum(beside) < 2, placer.name


def test_s05_a_fixed_buffer_per_device_makes_fewer_devices_better() -> None:
    """Four devices of 8 and one of 20, each with 4 taken: a model of 14 goes to the large one."""
    names = {f"cuda:{k}": 80 for k in range(4)} | {"cuda:4": 200}
    machine = hand_machine(names, reserve_bytes=40)
    problem = hand_problem(chain([20] * 7), machine)
    assert problem.limit_bytes == (40, 40, 40, 40, 160)
    assert set(where(place(problem, Search(), "1000ev")).values()) == {"cuda:4"}


def test_s08_shared_memory_is_not_offered_twice() -> None:
    """120 and an input of 1 in a pool of 100 are refused, although accelerator and CPU each claim
    100; moving layers to the CPU is no gain; 90 is accepted."""
    too_large = hand_problem(chain([30] * 4, "1,20"), muni(100))
    with pytest.raises(InfeasibleError, match=r"121 B.*100 B, 21 B too little"):
        place(too_large, Search(), "500ev")
    split = hand_placement(too_large, dict.fromkeys(("w3", "y3", "u3"), "cpu:0"))
    timeline = simulate(too_large, split)
    assert timeline.peak_bytes.max() <= 100
    assert timeline.missing_bytes["ram"] >= 20
    result = place(hand_problem(chain([30] * 3, "1,20"), muni(100)), Search(), "500ev")
    assert set(where(result).values()) == {"cuda:0"}


OPTIMIZERS: dict[str, tuple[Any, int]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "adam": (lambda p: torch.optim.Adam(p), 2),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_s10_optimizer_state_is_part_of_the_plan(name: str) -> None:
    """State takes 0, 1, 2 or 3 times the trainable bytes; with exactly the predicted peak of the
    order that needs least as the limit there is a plan, with one byte less there is none on one
    device."""
    make, copies = OPTIMIZERS[name]
    model = mlp(16, 3)
    model[0].weight.requires_grad_(False)
    trainable = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    problem = captured(model, (torch.zeros(4, 16),), equal(1, 10**9), make(model.parameters()))
    state = [op for op in problem.graph.ops if op.role == "state"]
    size = sum(problem.graph.tensors[op.outputs[0]].num_bytes for op in state)
    counters = 4 * len([op for op in state if problem.graph.tensors[op.outputs[0]].shape == ()])
    assert size - counters == copies * trainable
    alone = all_on(problem, 0)
    orders = (alone, in_trace_order(problem, alone))
    peak = min(int(simulate(problem, order).peak_bytes[0]) for order in orders)
    assert peak >= (1 + copies) * trainable
    fits = priced(problem.graph, problem.machine, limits={"cuda:0": peak})
    assert place(fits, Single(), "9ev").is_feasible
    with pytest.raises(InfeasibleError):
        place(priced(problem.graph, problem.machine, limits={"cuda:0": peak - 1}), Single(), "9ev")


def test_s11_will_it_fit_is_answered_without_gpu_and_weights() -> None:
    """A model on the meta device is planned for a described machine, with a breakdown per device
    that adds up to the peak."""
    with torch.device("meta"):
        model = mlp(64, 3)
    optimizer = torch.optim.Adam(model.parameters())
    problem = captured(
        model, (torch.zeros(8, 64, device="meta"),), load_machine("h200x1"), optimizer
    )
    timeline = place(problem, Single(), "9ev").timeline
    row = next(row for row in memory_rows(timeline) if row.device == "cuda:0")
    assert row.peak_bytes == max(timeline.peak_bytes)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert row.parts["parameters"] >= parameters
    assert row.parts["optimizer state"] >= 2 * parameters


class TwoStages(nn.Module):
    """Wide activations and few weights first, many weights and small activations behind."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(4, 4), nn.Tanh())])
        self.heavy = nn.Linear(4, 1500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Per-sample features, their mean, and a large product."""
        return self.heavy(self.wide(x).mean(0, keepdim=True))


def test_s12_backward_memory_counts_where_it_lives() -> None:
    """The weight-balanced split fits for inference, and is seen not to fit for training: the
    activations and gradients of the first stage pile up on its device."""
    model, machine = TwoStages(), equal(2, 40_000)
    pins = {"wide": "cuda:0", "heavy": "cuda:1"}
    inputs = (torch.zeros(500, 4),)
    still: Problem = captured(model, inputs, machine, pins=pins)
    moving: Problem = captured(model, inputs, machine, sgd(model), pins=pins)
    assert place(still, Single(), "9ev").is_feasible
    trained = place(moving, Single(), "9ev", allow_infeasible=True).timeline
    assert set(trained.missing_bytes) >= {"cuda:0"}
    assert trained.peak_bytes[0] > 6 * 500 * 4 * 4
    with pytest.raises(InfeasibleError, match="cuda:0"):
        place(moving, Single(), "9ev")
