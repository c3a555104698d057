"""The keys that random numbers by counters are made of: one step, one seed, any placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from devplace.cost.graph_transport import pack, unpack
from devplace.graph import OpGraph
from devplace.run.check import check_step
from devplace.run.compile import Step, compile_step
from devplace.run.cpu import CpuExecutor
from devplace.run.seeds import RandomKeys, op_seed
from devplace.run.unplaced import run_unplaced
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from devplace.tune.step_sources import step_sources
from devplace.tune.step_timing import fill, time_plan
from tests.run.models import mean_square
from tests.run.placed import adam
from tests.run.tracing import random_placement

NAMES = ("cpu:0", "cpu:1", "cpu:2")
# What is compiled is not what these are about.
pytestmark = pytest.mark.usefixtures("one_by_one")

BATCH = (torch.ones(4, 6),)


class Noisy(nn.Module):
    """Two layers, each with half of its output dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 32), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        hidden = nn.functional.dropout(self.one(x), 0.5)
        return nn.functional.dropout(self.two(hidden), 0.5)


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return Noisy()


def compiled(
    model: nn.Module, optimizer: Any, num_devices: int = 2, seed: int = 0, **options: Any
) -> Step:
    loss = None if optimizer is None else mean_square
    graph = capture(model, BATCH, loss, optimizer, fuse=True, **options)
    placed = random_placement(graph, num_devices, 3)
    return compile_step(model, optimizer, graph, *placed, NAMES[:num_devices], seed)


def unplaced(graph: OpGraph, model: nn.Module, seed: int, step: int) -> Any:
    values = step_sources(graph, model, None, BATCH)
    named = dict(model.named_parameters())
    sources = {
        b.op: named[b.key].detach() if b.kind == "parameter" else values[b.op].make("cpu")
        for b in graph.program.bindings
    }
    return run_unplaced(graph, sources, seed, step)[0]


def test_keys_are_pinned() -> None:
    """Low and high 32 bits of each op's seed: the same for ever."""
    keys = RandomKeys(capture(noisy(), BATCH, fuse=True))
    for seed, step in ((0, 1), (7, 1), (0, 2)):
        (found,) = keys.of_step(seed, step).values()
        assert found.dtype == torch.int32
        for position, row in enumerate(found.tolist()):
            expected = op_seed(seed, step, position)
            assert [word & 0xFFFFFFFF for word in row] == [
                expected & 0xFFFFFFFF,
                expected >> 32,
                0,
                0,
            ]


def test_a_step_that_draws_by_generators_has_no_keys() -> None:
    """Nor has one that draws nothing."""
    assert RandomKeys(capture(noisy(), BATCH)).of_step(0, 1) == {}
    assert RandomKeys(capture(nn.Linear(6, 2), BATCH, fuse=True)).of_step(0, 1) == {}


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_numbers_are_the_same_on_any_number_of_devices(num_devices: int) -> None:
    """And those of the unplaced step; other ones in the next step and for another seed."""
    model = noisy()
    outputs = []
    for seed in (0, 1):
        with compiled(model, None, num_devices, seed) as infer:
            for step in (1, 2, 3):
                outputs.append(infer(*BATCH))
                assert torch.equal(outputs[-1], unplaced(infer.first.graph, model, seed, step))
    masks = {tuple((output == 0).flatten().tolist()) for output in outputs}
    assert len(masks) == 6


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_passes_the_check(micro_batches: int) -> None:
    """Three steps on three devices, equal in every bit to the unplaced ones."""
    model = noisy()
    optimizer = adam(list(model.parameters()))
    graph = capture(model, BATCH, mean_square, optimizer, micro_batches, fuse=True)
    report = check_step(graph, model, optimizer, BATCH, *random_placement(graph, 3, 1), NAMES)
    assert report.is_bit_equal


def plain_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.0)


def still_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def still_adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.0)


@pytest.mark.parametrize("make", [plain_sgd, still_sgd, still_adam])
def test_syncing_and_loading_keep_the_number_of_the_step(make: Callable[..., Any]) -> None:
    """The losses of steps that are synced and loaded in between are those of steps that are not."""
    losses = []
    for loads in (False, True):
        model = noisy()
        with compiled(model, make(list(model.parameters()))) as step:
            for _ in range(4):
                losses.append(float(step(*BATCH)))
                if loads:
                    step.sync()
                    step.load()
    assert losses[:4] == losses[4:]
    assert len(set(losses)) == 4


def test_a_resumed_training_goes_on_with_the_next_numbers() -> None:
    """Adam counts its steps: a step captured after two of them draws the numbers of the third."""
    model = noisy()
    optimizer = still_adam(list(model.parameters()))
    with compiled(model, optimizer) as step:
        losses = [float(step(*BATCH)) for _ in range(2)]
        step.sync()
        losses.append(float(step(*BATCH)))
    with compiled(model, optimizer) as resumed:
        assert resumed.steps_done == 2
        assert float(resumed(*BATCH)) == losses[2]


def test_a_process_that_measures_draws_like_the_others() -> None:
    """A graph that was sent away, run on what was sent with it, has the numbers of every step."""
    model = noisy()
    graph = capture(model, BATCH, fuse=True)
    placed = random_placement(graph, 2, 0)
    found, sources = unpack(pack(graph, step_sources(graph, model, None, BATCH)))
    executor = CpuExecutor(make_schedule(found, *placed, NAMES[:2]), seed=4)
    try:
        fill(executor, sources)
        masks = [executor.step(number).results[0] == 0 for number in (1, 2)]
    finally:
        executor.close()
    assert all(
        torch.equal(mask, unplaced(graph, model, 4, number) == 0)
        for number, mask in enumerate(masks, 1)
    )
    assert not torch.equal(*masks)
    assert time_plan(found, *placed, NAMES[:2], sources, 0.01).step_ns > 0
