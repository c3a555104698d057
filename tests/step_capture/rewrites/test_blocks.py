"""Blocks that the backward pass computes again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.step_capture.checks import assert_same_training, sgd
from torch import nn

import devplace as dp
from devplace import placers, workloads
from devplace.errors import CaptureError
from devplace.graph import OpGraph
from devplace.step_capture import capture
from devplace.step_capture.rewrites.blocks import named_blocks


class Block(nn.Module):
    """A residual block of two linear layers, with batch norm, and dropout if it is wanted."""

    def __init__(self, width: int = 16, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(rate), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Chain(nn.Module):
    """Blocks, one of whose values a later one reads."""

    def __init__(self, blocks: int = 4, width: int = 16, rate: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, rate) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        x = first
        for block in self.blocks[1:]:
            x = block(x) + first
        return x


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def chain(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Chain(**options).double()


def rows(count: int = 3) -> list[tuple[torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 16).double(),) for _ in range(count)]


def trained(model: nn.Module, batches: Sequence[tuple[torch.Tensor]], **options: Any) -> Any:
    """Losses, weights and statistics after some steps, and the graph."""
    model = copy.deepcopy(model)
    graph = capture(model, batches[0], squared, sgd(model), **options)
    machine = dp.load_machine("cpux2")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    plan = placers.place(problem, placers.Random(), "3ev").plan
    with dp.compile(graph, plan, seed=5) as step:
        losses = [float(step(*batch)) for batch in batches]
        step.sync()
    return losses, model.state_dict(), graph


def test_steps_are_those_of_eager() -> None:
    """Statistics of batch norm are written once."""
    for model in (chain(), nn.Sequential(chain(), chain())):
        assert_same_training(model, rows(2), squared, sgd, recompute=True, tolerance=1e-9)


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"fuse": True, "micro_batches": 2}])
@pytest.mark.filterwarnings("ignore:micro_batches=")
def test_random_ops_draw_again_what_they_drew(options: Any) -> None:
    """Dropout of blocks that are computed again is that of blocks that are kept."""
    model = chain(rate=0.5)
    if "micro_batches" in options:
        for block in model.blocks:
            block.norm = nn.Identity()
    plain, again = (trained(model, rows(), recompute=r, **options) for r in (False, True))
    torch.testing.assert_close(again[0], plain[0], rtol=1e-12, atol=1e-12)
    for name, value in plain[1].items():
        torch.testing.assert_close(again[1][name], value, rtol=1e-12, atol=1e-12)
    assert len(again[2].ops) > len(plain[2].ops)


def kept_bytes(graph: OpGraph) -> int:
    """Bytes made in the forward pass that the rest of the step reads."""
    ops, producer = graph.ops, graph.producer
    kept = set()
    for op in ops:
        if op.stage in ("backward", "update"):
            for tensor in op.inputs:
                maker = ops[producer[tensor]]
                while maker.is_view:
                    tensor = maker.alias_of
                    maker = ops[producer[tensor]]
                if maker.stage == "forward":
                    kept.add(tensor)
    return sum(graph.tensors[tensor].num_bytes for tensor in kept)


def test_only_what_blocks_read_and_give_is_kept() -> None:
    """Of 12 blocks inputs of 6 x 16 doubles stay, the output, and what the loss keeps."""
    model = chain(blocks=12)
    one = 6 * 16 * 8
    plain, again = (
        kept_bytes(capture(model, rows()[0], squared, sgd(model), recompute=r))
        for r in (False, True)
    )
    assert plain > 12 * 10 * one
    assert again <= 26 * one  # a sum beside each input


@pytest.mark.parametrize("fuse", [False, True])
def test_memory_falls_where_the_order_is_kept(fuse: bool) -> None:
    """In the order of the trace one device needs less than half as much; the order of fused groups
    is that of what they hold."""
    with torch.device("meta"):
        model, x = Chain(blocks=12, width=64), torch.empty(2048, 64)
    peaks = []
    for again in (False, True):
        graph = capture(model, (x,), squared, sgd(model), recompute=again, fuse=fuse)
        machine = dp.load_machine("h100x1")
        problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine), exclude=["cpu:0"])
        gpu = machine.device_names.index("cuda:0")
        runs = [k for k, op in enumerate(graph.ops) if not (op.is_source or op.is_view)]
        order = tuple(tuple(runs) if k == gpu else () for k in range(2))
        placement = dp.Placement((gpu,) * len(graph.ops), None, order)
        peaks.append(int(dp.simulate(problem, placement).peak_bytes[gpu]))
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("name", ["bert-base", "gpt-2", "llama", "vit-b-16", "resnet-50", "moe"])
@pytest.mark.slow
def test_losses_of_workloads_stay(name: str) -> None:
    """Bit for bit."""
    losses = []
    for again in (False, True):
        workload = workloads.build(name, size="small", device="cpu")
        model = workload.model
        graph = capture(model, workload.inputs, workload.loss_fn, sgd(model), recompute=again)
        machine = dp.load_machine("cpux1")
        problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
        plan = placers.place(problem, placers.Single(), "3ev").plan
        with dp.compile(graph, plan, seed=1) as step:
            losses.append([float(step(*workload.inputs)) for _ in range(3)])
    assert losses[0] == losses[1]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(), Expert()])


def test_blocks_are_the_outermost_repeated_modules() -> None:
    """Not the lists of them, not what lies in them, and not what has no modules."""
    layers = nn.ModuleDict({"stem": nn.Linear(4, 4), "layers": nn.Sequential(Layer(), Layer())})
    assert named_blocks(layers, True) == ("layers.0", "layers.1")
    stages = nn.Sequential(
        nn.Sequential(Expert(), Expert()), nn.Sequential(Expert(), Expert()), nn.Linear(4, 4)
    )
    assert named_blocks(stages, True) == ("0.0", "0.1", "1.0", "1.1")
    pairs = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    assert named_blocks(pairs, True) == ("0", "1")
    assert named_blocks(layers, ["layers.1"]) == ("layers.1",)
    assert named_blocks(layers, False) == ()


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (True, "repeats nothing"),
        (["middel"], "Did you mean 'middle'"),
        ("middle", "names of modules"),
        (None, "names of modules"),
        (3, "names of modules"),
        ([["middle"]], "names no module"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(wanted: Any, says: str) -> None:
    model = nn.Module()
    model.middle = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=says):
        named_blocks(model, wanted)


class Again(nn.Module):
    """One block, called some times in a row: as a loop, or as entries of a list."""

    def __init__(self, calls: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()] * calls)
        self.last = self.blocks[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_stands_in_a_list_twice_is_repeated() -> None:
    """Its first name is the one that counts, whichever is given."""
    model = Again(2)
    assert named_blocks(model, True) == ("blocks.0",)
    assert named_blocks(model, ["last", "blocks.1", "blocks.0"]) == ("blocks.0",)


def test_every_call_of_a_block_keeps_its_own_input() -> None:
    """Calls in a row are as so many blocks, and lists as their members."""
    torch.manual_seed(0)
    model, one = Again(12).double(), 6 * 16 * 8
    graph = capture(model, rows()[0], squared, sgd(model), recompute=True)
    assert kept_bytes(graph) <= 26 * one
    losses = [trained(model, rows(), recompute=again)[0] for again in (False, True)]
    assert losses[0] == losses[1]
    several = chain(blocks=12)
    given = [
        capture(several, rows()[0], squared, sgd(several), recompute=again)
        for again in (True, ["blocks"])
    ]
    assert kept_bytes(given[0]) == kept_bytes(given[1])


def test_the_whole_model_can_be_computed_again() -> None:
    """Nothing but what its call gives is kept, and what the loss keeps."""
    model = chain(blocks=4)
    graph = capture(model, rows()[0], squared, sgd(model), recompute=[""])
    assert kept_bytes(graph) <= 3 * 6 * 16 * 8
    losses = [trained(model, rows(), recompute=again)[0] for again in (False, [""])]
    assert losses[0] == losses[1]


def test_nothing_happens_without_a_backward_pass() -> None:
    model = chain()
    graph = capture(model, rows()[0], squared, recompute=True)
    assert {op.stage for op in graph.ops} <= {"source", "forward"}
    assert graph.meta["recompute"] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
