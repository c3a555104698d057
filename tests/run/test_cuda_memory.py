"""Under a limit on the process, steps on GPUs get by with what they were seen to take."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from devplace.errors import DeviceMemoryError
from devplace.run.compile import compile_step
from devplace.run.cuda.device_memory import SPARE_BYTES, DeviceMemory
from devplace.run.cuda.eager import EagerRunner
from devplace.schedule.heap import LARGE_PAGE_BYTES
from devplace.step_capture import capture
from tests.run.models import Normed, mean_square
from tests.run.placed import adam
from tests.run.test_cuda_faults import MIB, NUM_GPUS, executor_of, hog, make, warm, wide
from tests.run.tracing import random_placement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]

Case = tuple[Any, Any, Any, tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _without_limits() -> Iterator[None]:
    """The same weights in every run; no limit on memory afterwards."""
    torch.manual_seed(0)
    yield
    for device in range(NUM_GPUS):
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def allow(num_bytes: int) -> None:
    """Let this process have so much of cuda:0, with what it holds."""
    clean()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total, 0)


def clean() -> None:
    """Give back what nobody uses."""
    gc.collect()
    torch.cuda.empty_cache()


def run_steps(case: Case) -> tuple[list[float], DeviceMemory, str]:
    """Two losses of a new step, its memory, and how it ran; then it is closed."""
    clean()
    torch.cuda.reset_peak_memory_stats(0)
    step = make(case)
    losses = [float(step(*case[3])) for _ in range(2)]
    (found,) = step.executor.measured_memory()  # type: ignore[attr-defined]
    mode = step.executor.mode  # type: ignore[attr-defined]
    step.close()
    return losses, found, mode


def test_a_step_runs_with_what_it_reserved_without_a_limit() -> None:
    """The same losses from graphs; afterwards nothing is left in use."""
    case = wide()
    before = warm(case)
    expected, free, _ = run_steps(case)
    allow(free.reserved_peak_bytes)
    losses, tight, mode = run_steps(case)
    assert (losses, mode) == (expected, "graph")
    # A segment that grows does so by whole pages of 20 MiB, of which torch's limit knows nothing.
    assert tight.reserved_peak_bytes <= free.reserved_peak_bytes + 20 * MIB
    clean()
    assert torch.cuda.memory_allocated(0) <= before


def test_a_step_runs_with_its_tensors_and_the_spare_part() -> None:
    """Peak of tensors and work buffers, a page, and what is planned beside them, are enough."""
    case = wide()
    before = warm(case)
    expected, free, _ = run_steps(case)
    allow(free.step_peak_bytes + LARGE_PAGE_BYTES + SPARE_BYTES)
    losses, _, mode = run_steps(case)
    assert (losses, mode) == (expected, "graph")
    clean()
    assert torch.cuda.memory_allocated(0) <= before
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert run_steps(case)[0] == expected


def test_a_light_trial_is_enough_for_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose usual trial finds no memory gives the same losses from graphs, and reserves
    about as much as ever where there is plenty."""
    case = wide()
    warm(case)
    expected, free, _ = run_steps(case)
    monkeypatch.setattr(EagerRunner, "rehearse", hog)
    losses, light, mode = run_steps(case)
    assert (losses, mode) == (expected, "graph")
    assert light.reserved_peak_bytes < 1.2 * free.reserved_peak_bytes


def test_a_light_trial_learns_the_same_in_less_memory() -> None:
    """Strides and layouts equal those of a usual trial; it takes but a part of the memory."""
    case = wide()
    warm(case)
    step = make(case)
    executor: Any = step.executor
    for op, record in enumerate(executor.schedule.graph.ops):
        if op in executor._missing:
            tensor = executor.schedule.graph.tensors[record.outputs[0]]
            dtype = getattr(torch, tensor.dtype)
            executor.put(op, torch.ones(tensor.shape, dtype=dtype))
    found, peaks = [], []
    for name in ("rehearse", "rehearse_lightly"):
        eager = executor._make_eager()
        clean()
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_allocated(0)
        with torch.no_grad():
            getattr(eager, name)(1)
        torch.cuda.synchronize(0)
        peaks.append(torch.cuda.max_memory_allocated(0) - before)
        found.append(eager.strides)
    step.close()
    assert found[0] == found[1]
    # Three gradients of 64 MiB, against arguments and result of one op.
    assert peaks[1] < 3 * 64 * MIB + 8 * MIB


@pytest.mark.parametrize("num_devices", [1, 2])
def test_layouts_of_convolutions_are_learned_alike(num_devices: int) -> None:
    """Also with channels last, and across devices."""
    if num_devices > NUM_GPUS:
        pytest.skip("needs two CUDA devices")
    model = Normed().cuda().to(memory_format=torch.channels_last)
    batch = (torch.randn(64, 2, 64, 64, device="cuda").to(memory_format=torch.channels_last),)
    optimizer = adam(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    placed = random_placement(graph, num_devices, 0)
    step = compile_step(model, optimizer, graph, *placed, ("cuda:0", "cuda:1")[:num_devices])
    step(*batch)
    executor: Any = step.executor
    found = []
    for name in ("rehearse", "rehearse_lightly"):
        eager = executor._make_eager()
        with torch.no_grad():
            getattr(eager, name)(1)
        layouts = {t: (v.shape, v.stride(), v.dtype) for t, v in eager.layouts.items()}
        found.append((eager.strides, layouts))
    step.close()
    assert found[0] == found[1]


def test_values_and_receive_buffers_lie_in_one_piece_each() -> None:
    """All sources of a device share a storage, and so do its receive buffers; values put again
    after a release are right."""
    num_devices = min(2, NUM_GPUS)
    executor = executor_of(num_devices)
    executor.step(1)
    runner: Any = executor._runner
    for index, device in executor._devices.items():
        storages = {
            value.untyped_storage().data_ptr() for value in device.buffers.values() if value.numel()
        }
        assert len(storages) == 1, index
        received = {
            runner._mailroom.buffers[transfer].untyped_storage().data_ptr()
            for transfer, record in enumerate(executor.schedule.transfers)
            if record.dst == index and runner._mailroom.buffers[transfer].numel()
        }
        assert len(received) <= 1, index
        assert not storages & received
    kept = {op: executor.get(op).cpu() for op in executor.schedule.holders}
    del runner
    executor._release()
    for op, value in kept.items():
        executor.put(op, value)
    assert all(torch.equal(executor.get(op).cpu(), value) for op, value in kept.items())
    executor.step(2)
    assert executor.mode == "graph"
    executor.close()


def test_a_step_that_is_too_large_by_five_percent_fails_by_name() -> None:
    """With 7 % less than its tensors take, the error names the device, and a step runs again
    without the limit."""
    case = wide()
    before = warm(case)
    expected, free, _ = run_steps(case)
    allow(round(free.step_peak_bytes / 1.07))
    with pytest.raises(DeviceMemoryError, match="cuda:0"):
        run_steps(case)
    clean()
    assert torch.cuda.memory_allocated(0) <= before
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert run_steps(case)[0] == expected
