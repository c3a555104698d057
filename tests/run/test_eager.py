"""Steps run op by op on GPUs; tensors of the meta device stand in for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.eager import _Copies
from devplace.run.cuda.host import HostDevice
from devplace.schedule import PlannedTransfer


class FakeGpu(CudaDevice):
    """A GPU whose memory is the meta device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device("meta")
        self.buffers = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        yield


def copies(sender: Any, receiver: Any, layouts: dict[int, Any]) -> _Copies:
    transfer = PlannedTransfer(tensor=0, src=0, dst=1, num_bytes=8)
    schedule: Any = SimpleNamespace(transfers=(transfer,))
    return _Copies(schedule, {0: sender, 1: receiver}, ("peer",), layouts, {}, {})


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_what_a_gpus_op_left_in_host_memory_stays_there(dtype: torch.dtype) -> None:
    """Seed and offset of attention with dropout reach another GPU's op as they are: in host
    memory, where it reads them; their layout is noted for when they are on the device."""
    layouts: dict[int, Any] = {}
    carrier = copies(FakeGpu(0), FakeGpu(1), layouts)
    carrier.send(0, torch.tensor(7, dtype=dtype))
    received = carrier.receive(0)
    assert received.device.type == "cpu"
    assert received == 7
    assert (layouts[0].shape, layouts[0].dtype) == ((), dtype)


def test_other_tensors_reach_the_memory_of_the_gpu() -> None:
    """Those of a GPU and those of a CPU device do."""
    host = HostDevice(0, frozenset())
    for sender, value in ((FakeGpu(0), torch.empty(3, device="meta")), (host, torch.ones(3))):
        carrier = copies(sender, FakeGpu(1), {})
        carrier.send(0, value)
        assert carrier.receive(0).device.type == "meta"
