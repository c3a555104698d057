"""How errors of CUDA are told; needs no GPU."""

from __future__ import annotations

import pytest
import torch

from devplace.errors import DeviceLostError, DeviceMemoryError, ExecutionError
from devplace.run.cuda.failures import (
    forget_frames,
    is_lasting,
    is_out_of_memory,
    lost_device_error,
    memory_error,
    step_error,
)

OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.10 GiB of "
    "which 1.00 GiB is free."
)


def chained() -> ExecutionError:
    """An op's error that came from lacking memory."""
    try:
        try:
            raise torch.OutOfMemoryError(OOM)
        except torch.OutOfMemoryError as cause:
            raise ExecutionError("Op 'mm' failed on cuda:1: no memory.") from cause
    except ExecutionError as error:
        return error


def test_lacking_memory_is_seen_behind_an_ops_error() -> None:
    """The device, what was asked for and what the plan predicted are told."""
    error = chained()
    assert is_out_of_memory(error)
    assert not is_lasting(error)
    found = memory_error("Warming up", error, {"cuda:1": 2**30}, ("cuda:0", "cuda:1"))
    assert isinstance(found, DeviceMemoryError)
    assert (found.device, found.wanted_bytes) == ("cuda:1", 5 * 2**29)
    assert found.predicted_bytes == 2**30
    assert str(found).startswith("Warming up needed more memory than cuda:1 has; 2.5 GiB more were")
    assert "model and optimizer are untouched" in str(found)


def test_an_unknown_device_is_not_made_up() -> None:
    """Among several devices none is named if the error names none."""
    found = memory_error("Step 1", RuntimeError("out of memory"), {}, ("cuda:0", "cuda:1"))
    assert found.device == ""
    assert "than a device has" in str(found)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: unspecified launch failure",
        "Triton Error [CUDA]: misaligned address",
    ],
)
def test_errors_that_last_are_known(text: str) -> None:
    """Those after which the process is of no use say so and why."""
    error = RuntimeError(text + "\nCompile with TORCH_USE_CUDA_DSA")
    assert is_lasting(error)
    found = lost_device_error("Step 3", error)
    assert isinstance(found, DeviceLostError)
    assert text in str(found)
    assert "DSA" not in str(found)
    assert "Restart the process" in str(found)


def test_other_errors_keep_their_own_text() -> None:
    """A plain error is told with its first line; one of ours stays itself."""
    assert str(step_error(2, RuntimeError("odd\nmore"))).startswith("Step 2 failed: odd. The state")
    ours = ExecutionError("Op 'x' failed.")
    assert step_error(2, ours) is ours
    assert not is_lasting(ours)
    assert not is_out_of_memory(ours)


def test_frames_of_a_forgotten_error_hold_nothing() -> None:
    """Tensors in the frames of an error and of its causes are let go."""
    import weakref

    seen: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.zeros(3)
        seen.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(OOM)

    try:
        try:
            fail()
        except torch.OutOfMemoryError as cause:
            raise ExecutionError("no") from cause
    except ExecutionError as error:
        kept = error
    assert seen[0]() is not None
    forget_frames(kept)
    assert seen[0]() is None
