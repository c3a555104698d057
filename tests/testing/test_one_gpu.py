"""Several GPUs of a plan on one."""

from __future__ import annotations

import pytest
import torch
from tests.run import gpus
from tests.run.models import Normed, mean_square
from tests.run.placed import adam

from devplace.run.check import check_step
from devplace.run.cuda import executor
from devplace.step_capture import capture
from devplace.testing.one_gpu import one_gpu

pytestmark = [*gpus.MARKS, gpus.real_gpu]


def test_four_devices_on_one_gpu_give_the_unplaced_numbers() -> None:
    """Transfers, flags and graphs of a random placement over four devices, dropout included."""
    torch.manual_seed(0)
    model, batch = Normed(0.5).to("cuda:0"), (torch.randn(4, 2, 8, 8, device="cuda:0"),)
    optimizer = adam(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    names = tuple(f"cuda:{k}" for k in range(4))
    with gpus.deterministic(), one_gpu():
        report = check_step(
            graph, model, optimizer, batch, *gpus.at_random(graph, 4), names, steps=5
        )
    assert report.is_bit_equal
    assert report.num_transfers > 0


@pytest.mark.skipif(gpus.ON_ONE, reason="all tests run so")
def test_afterwards_devices_are_themselves_again() -> None:
    """What is patched meanwhile is put back."""
    before = executor.CudaDevice, executor.have_peer_access
    with one_gpu():
        assert executor.have_peer_access("cuda:0", "cuda:9")
    assert (executor.CudaDevice, executor.have_peer_access) == before
