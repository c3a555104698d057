"""Several shapes of a step on GPUs: one memory for the weights; stand-ins where there is no GPU."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from devplace.run.compile import compile_step
from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.executor import CudaExecutor
from devplace.run.cuda.host import HostDevice
from devplace.run.executors import make_executor
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from tests.run import gpus
from tests.run.models import Clipped, mean_square
from tests.run.placed import adam, largest_difference, train_eager


class FakeGpu(CudaDevice):
    """A GPU whose memory is that of the host."""

    def __init__(self, source_bytes: dict[int, int]) -> None:
        self.torch_device = torch.device("cpu")
        self.buffers = {}
        self.puts: list[int] = []
        self._source_bytes, self._memory = source_bytes, None

    def put(self, op: int, value: Any) -> None:
        self.puts.append(op)
        if op not in self.buffers:
            self.buffers[op] = self._room_for(op, value)
        self.buffers[op].copy_(value)

    def synchronize(self) -> None:
        """Nothing runs here."""


def executor(holders: dict[int, tuple[int, ...]], devices: dict[int, Any]) -> Any:
    """An executor that holds sources and runs nothing."""
    made: Any = object.__new__(CudaExecutor)
    made.schedule = SimpleNamespace(
        holders=holders, device_of_op={k: d[0] for k, d in holders.items()}
    )
    made._all, made._idle, made._lost, made._ranks, made._runner = devices, {}, None, None, None
    made._missing, made.put_count = set(holders), {}
    return made


def test_the_memory_of_a_source_is_shared_where_devices_agree() -> None:
    """The tensor itself, once; where a device lacked it there, it has a copy; no room is kept for
    what is shared."""
    one = executor({3: (0,), 4: (0,), 5: (1,)}, {0: FakeGpu({3: 8, 4: 8}), 1: FakeGpu({5: 8})})
    for op in (3, 4, 5):
        one.put(op, torch.full((1,), float(op), dtype=torch.float64))
    two = executor(
        {13: (0,), 14: (0, 1), 15: (1,), 9: (0,)},
        {0: FakeGpu({13: 8, 14: 8, 9: 4}), 1: FakeGpu({14: 8, 15: 8})},
    )
    moved = {13: 3, 14: 4, 15: 5}
    two.take(one, moved)
    assert two._all[0].buffers[13] is one._all[0].buffers[3]
    assert two._all[1].buffers[15] is one._all[1].buffers[5]
    assert two._all[0].buffers[14] is not one._all[0].buffers[4]
    assert [float(two._all[d].buffers[14]) for d in (0, 1)] == [4.0, 4.0]
    assert two._missing == {9}
    two.put(9, torch.ones(1))
    assert two._all[0]._memory.numel() < 3 * 512  # of 14 and 9, not of 13
    two._all[0].buffers[13].fill_(7.0)  # a step of the second shape
    two._all[0].buffers[14].fill_(8.0)
    one.take(two, {theirs: mine for mine, theirs in moved.items()})
    assert float(one._all[0].buffers[3]) == 7.0
    assert float(one._all[0].buffers[4]) == 8.0
    assert one._all[0].puts == [3, 4, 4]


def test_a_cpu_beside_gpus_takes_the_value_itself() -> None:
    """Steps there make new tensors and write into none."""
    one = executor({3: (0,)}, {0: HostDevice(0)})
    one.put(3, torch.ones(2))
    two = executor({5: (0,)}, {0: HostDevice(0)})
    two.take(one, {5: 3})
    assert two._all[0].buffers[5] is one._all[0].buffers[3]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [pytest.param(1, marks=gpus.needs(1)), *gpus.COUNTS])
def test_mixed_shapes_train_as_the_ordinary_loop_on_gpus(count: int) -> None:
    """Weights lie at one address for all shapes placed alike, whichever runs."""
    torch.manual_seed(0)
    model = Clipped().double().to(gpus.HOME)
    twin = copy.deepcopy(model)
    optimizer, other = adam(list(model.parameters())), adam(list(twin.parameters()))
    data = [
        (torch.randn(rows, 4, dtype=torch.float64, device=gpus.HOME),) for rows in (8, 3, 3, 8, 3)
    ]
    graphs = [capture(model, each, mean_square, optimizer) for each in data[:2]]
    placed = [gpus.in_layers(graph, count) for graph in graphs]
    names = gpus.names(count)
    with compile_step(model, optimizer, graphs[0], *placed[0], names, waits=False) as step:
        step.add(
            graphs[1],
            lambda: make_executor(make_schedule(graphs[1], *placed[1], names), waits=False),
        )
        losses = [float(step(*each)) for each in data]
        expected = train_eager(twin, other, data, mean_square)
        assert losses == pytest.approx(expected, abs=1e-9)
        step.sync()
    assert largest_difference(model, twin) < 1e-9
