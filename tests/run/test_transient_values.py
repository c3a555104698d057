"""A step tried without keeping large values learns the same as one that keeps them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from devplace import workloads
from devplace.graph import Op, OpGraph, Tensor
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.cuda import eager as eager_module
from devplace.run.cuda import transient_values
from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.eager import EagerRunner
from devplace.run.cuda.transient_values import LightValues, lightened
from devplace.run.state import ModelState
from devplace.schedule import Schedule, make_schedule
from devplace.schedule.linear import linear_order
from devplace.schedule.write_back import write_backs
from devplace.step_capture import capture
from tests.run.models import Clipped, Normed, mean_square
from tests.run.placed import adam
from tests.run.tracing import random_placement

NAMES = ("cuda:0", "cuda:1")


class FakeGpu(CudaDevice):
    """A GPU whose memory is that of the CPU."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("cpu")
        self.buffers = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        yield


class NoRandom:
    """For a step without random ops."""

    def draws(self, name: str) -> bool:
        return False

    def start_step(self, number: int) -> None:
        """Nothing to seed."""


class LargestSize(TorchDispatchMode):
    """Most bytes of new tensors that are alive at once, storages counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self.tensors: Counter[int] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self.note(value)
        return found

    def note(self, value: Any) -> None:
        """Count a storage while any tensor lies in it."""
        key, size = value.untyped_storage()._cdata, value.untyped_storage().nbytes()
        self.tensors[key] += 1
        if self.tensors[key] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(value, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        """A tensor has gone, and with the last one its storage."""
        self.tensors[key] -= 1
        if self.tensors[key] == 0:
            self.now -= size


def case(name: str) -> tuple[Any, dict[int, Any]]:
    """Graph of a model and a value per source."""
    torch.manual_seed(0)
    loss: Any = mean_square
    if name == "clipped":
        model, batch = Clipped(), (torch.randn(8, 4),)
    elif name == "normed":
        model = Normed().to(memory_format=torch.channels_last)
        batch = (torch.randn(4, 2, 8, 8).to(memory_format=torch.channels_last),)
    else:
        workload = workloads.build(name, size="small", device="cpu")
        model, batch, loss = workload.model, workload.inputs, workload.loss_fn
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    optimizer = adam(list(model.parameters()))
    graph = capture(model, batch, loss, optimizer)
    return graph, values_of(graph, model, batch, optimizer)


def values_of(graph: Any, model: Any, batch: Any, optimizer: Any) -> dict[int, Any]:
    """A value per source."""
    return {
        **ModelState(graph, model, optimizer).read(),
        **bind_inputs(graph, batch, {}),
        **bind_scalars(graph, 1, optimizer.param_groups),
    }


def runner_of(schedule: Schedule, values: dict[int, Any]) -> EagerRunner:
    """A runner whose GPUs are the CPU."""
    active = [k for k, some in enumerate(schedule.instructions) if some]
    devices = {k: FakeGpu(k) for k in active}
    for op, holders in schedule.holders.items():
        for k in holders:
            if k in devices:
                devices[k].buffers[op] = values[op].detach().clone()
    random: Any = {k: NoRandom() for k in active}
    routes: Any = ["peer"] * len(schedule.transfers)
    order = linear_order(schedule)
    return EagerRunner(schedule, devices, random, order, write_backs(schedule), routes)


def learned(runner: EagerRunner) -> tuple[Any, Any]:
    """Layouts and strides, to compare."""
    layouts = {
        transfer: (like.shape, like.stride(), like.dtype)
        for transfer, like in runner.layouts.items()
    }
    return layouts, runner.strides


@pytest.fixture
def _all_are_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even tiny tensors count as large; copies between fake GPUs are made."""
    monkeypatch.setattr(transient_values, "LIGHT_BYTES", 1)
    monkeypatch.setattr(eager_module, "_lies_on_host", lambda value, sender: False)


@pytest.mark.usefixtures("_all_are_light")
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", ["clipped", "normed", "nmt-2", "inception-v3"])
@pytest.mark.slow
def test_a_light_trial_learns_the_same_layouts(name: str, num_devices: int) -> None:
    """Layouts of transfers and strides of new values equal those of a step that keeps all; the
    state stays as it was."""
    graph, values = case(name)
    placed = random_placement(graph, num_devices, 0)
    schedule = make_schedule(graph, *placed, NAMES[:num_devices])
    usual, lean = runner_of(schedule, values), runner_of(schedule, values)
    with torch.no_grad():
        usual._compute(1, {}, is_trial=True)
        lean.rehearse_lightly(1)
    assert learned(usual) == learned(lean)
    assert len(lean.strides) > 0
    for index, device in lean._devices.items():
        for op, value in device.buffers.items():
            assert torch.equal(value, values[op]), (index, op)


class Deep(nn.Module):
    """Many layers whose activations a step must keep."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(num_layers))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).sigmoid()
        return x


def test_a_light_trial_takes_the_memory_of_its_largest_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A net of 20 layers keeps at least 20 activations in a usual trial, and never more than the
    tensors of one op (two arguments and a result here, beside small ones) in a light
    one."""
    monkeypatch.setattr(transient_values, "LIGHT_BYTES", 2**20)
    model, batch = Deep(20), (torch.randn(4096, 64),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, batch, mean_square, optimizer)
    schedule = make_schedule(graph, *random_placement(graph, 1, 0), NAMES[:1])
    values = values_of(graph, model, batch, optimizer)
    activation, peaks = 4096 * 64 * 4, []
    for is_light in (False, True):
        runner = runner_of(schedule, values)
        with torch.no_grad(), LargestSize() as sizes:
            runner._compute(1, {}, is_trial=True, is_light=is_light)
        peaks.append(sizes.peak)
    assert peaks[0] > 20 * activation
    assert peaks[1] < 4 * activation


READS = OpGraph(
    "reads",
    (
        Op("a", "f", outputs=(0,)),
        Op("b", "aten.as_strided.default", inputs=(0,), outputs=(1,), alias_of=0),
    ),
    (Tensor("a", (9,), "float32", 36), Tensor("b", (9,), "float32", 36)),
)
"""Tensor 0 is read by as_strided, tensor 1 by nothing."""


def test_integers_and_small_and_held_values_stay() -> None:
    """Indices, masks, tensors below the limit, and views of what is held anyhow are kept."""
    size = transient_values.LIGHT_BYTES
    held = torch.randn(size)
    values = LightValues(READS, [held])
    for value in (
        torch.arange(size),
        torch.ones(size, dtype=torch.bool),
        torch.ones(3),
        held[5:],
    ):
        values[1] = value
        assert values[1] is value


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(1024, 512),
        torch.randn(512, 1024).t(),
        torch.randn(2, 64, 64, 64).to(memory_format=torch.channels_last),
        torch.randn(1024, 1, 512).expand(1024, 3, 512),
        torch.randn(1024, 2048)[:, 512:1024],
        torch.randn(2**20).to(torch.bfloat16),
    ],
)
def test_a_value_made_anew_has_the_layout_of_the_old_one(value: Any) -> None:
    """Shape, strides and dtype are equal, and every element is in the domain of a logarithm."""
    described = lightened(value)
    assert not isinstance(described, torch.Tensor)
    made = described.made()
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    assert bool((made == transient_values.STAND_IN).all())


def test_a_value_is_made_anew_for_every_reader() -> None:
    """Nothing of its size is kept between two that read it."""
    values = LightValues(READS)
    values[1] = torch.randn(1024, 512)
    large = values[1]
    assert large.shape == (1024, 512)
    assert values[1] is not large


def test_as_strided_finds_the_whole_storage() -> None:
    """A value that as_strided reads keeps the size of its storage and its place there."""
    base = torch.randn(2**20)
    values = LightValues(READS)
    values[0] = base[512:1024]
    made = values[0]
    assert made.storage_offset() == 512
    assert made.untyped_storage().nbytes() == 2**22
    torch.as_strided(made, (2**19,), (2,), 0)
