"""Fused steps on GPUs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from devplace import workloads
from devplace.graph import OpGraph
from devplace.kernels import fused
from devplace.run.check import check_step
from devplace.run.compile import compile_step
from devplace.step_capture import capture
from tests.run import gpus
from tests.run.models import mean_square
from tests.run.placed import adam
from tests.run.tracing import place_by_module

pytestmark = [*gpus.MARKS, pytest.mark.usefixtures("no_kernels_yet")]

MIB = 2**20
COUNTS = [1, pytest.param(2, marks=gpus.needs(2))]


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    """Deterministic kernels in full float32, the same weights in every run."""
    torch.manual_seed(0)
    with gpus.deterministic():
        yield


@dataclass(frozen=True)
class Training:
    """A fused training step with what is needed to run it."""

    graph: OpGraph
    model: Any
    optimizer: Any
    batch: tuple[Any, ...]

    def is_equal(self, count: int, steps: int = 5) -> bool:
        """Whether it is bit-equal to the unplaced step, at random on so many devices."""
        placed = gpus.at_random(self.graph, count)
        names = gpus.names(count)
        step = (self.graph, self.model, self.optimizer, self.batch)
        return check_step(*step, *placed, names, steps=steps).is_bit_equal

    def losses(self, count: int) -> list[float]:
        """Of three steps, at random on so many devices."""
        placed = gpus.at_random(self.graph, count, count)
        names = gpus.names(count)
        with compile_step(self.model, self.optimizer, self.graph, *placed, names) as step:
            return [float(step(*self.batch)) for _ in range(3)]


def training(name: str, fuse: bool = True, **config: Any) -> Training:
    """A small workload with Adam, captured on the first device."""
    made = workloads.build(name, size="small", device=gpus.HOME, **config)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-3)
    graph = capture(made.model, made.inputs, made.loss_fn, optimizer, fuse=fuse)
    return Training(graph, made.model, optimizer, made.inputs)


WORKLOADS: list[tuple[str, dict[str, Any]]] = [
    ("gpt-2", {"layers": 2}),
    ("bert-large", {"layers": 2}),
    ("resnet-50", {}),
    ("nmt-2", {}),
]


@pytest.mark.parametrize(("name", "config"), WORKLOADS)
def test_placed_fused_steps_give_the_unplaced_numbers(name: str, config: dict[str, Any]) -> None:
    """On one and on two GPUs bit for bit, over five steps; every group was compiled."""
    step = training(name, **config)
    for count in (1, 2):
        if count <= gpus.NUM_DEVICES:
            assert step.is_equal(count)
    assert fused.failures() == {}


def test_dropout_of_fused_steps_depends_on_the_seed_alone() -> None:
    """The same losses on one and two GPUs, others in every step; only attention draws numbers in a
    kernel of its own."""
    step = training("gpt-2", layers=1, dropout=0.3)
    assert all("attention" in name for name in step.graph.program.random_ops)
    losses = [step.losses(count) for count in (1, 2) if count <= gpus.NUM_DEVICES]
    assert all(found == losses[0] for found in losses)
    assert len(set(losses[0])) == 3


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("count", COUNTS)
def test_members_can_be_run_one_by_one(count: int) -> None:
    """Without a compiler a fused step runs, as the unplaced one."""
    step = training("gpt-2", layers=1)
    assert step.is_equal(count, steps=3)
    assert fused.failures()
    assert all("DEVPLACE_COMPILE=0" in reason for reason in fused.failures().values())


def test_compiled_steps_follow_those_of_torchs_kernels() -> None:
    """Three losses of a step without dropout agree with the plain one's within 1e-4."""
    plain = training("gpt-2", fuse=False, layers=1, dropout=0.0)
    step = training("gpt-2", layers=1, dropout=0.0)
    assert step.losses(1) == pytest.approx(plain.losses(1), rel=1e-4)


@gpus.real_gpu
def test_new_state_is_written_over_the_old() -> None:
    """Buffers stay where they are; beside them lie gradients and activations, and no second copy of
    a parameter or moment of 64 MiB."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False))
    twin = copy.deepcopy(model).cuda()
    batch = (torch.randn(256, 4096, device="cuda"),)
    graph = capture(twin, batch, mean_square, adam(list(twin.parameters())), fuse=True)
    del twin
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    placed = place_by_module(graph, lambda op: 0, 1)
    optimizer = adam(list(model.parameters()))
    with compile_step(model, optimizer, graph, *placed, ("cuda:0",)) as step:
        executor: Any = step.executor
        places = {op: executor.get(op).data_ptr() for op in graph.replaced}
        values = {op: executor.get(op).clone().cpu() for op in graph.replaced}
        for _ in range(3):
            step(*batch)
        (found,) = executor.measured_memory()
        assert executor.mode == "graph", executor.reason
        assert {op: executor.get(op).data_ptr() for op in graph.replaced} == places
        assert not any(torch.equal(executor.get(op).cpu(), old) for op, old in values.items())
    assert len(places) == 6
    state, gradients, activations = 6 * 64 * MIB, 2 * 64 * MIB, 4 * 4 * MIB
    assert found.step_peak_bytes - before < state + gradients + activations + 48 * MIB
