"""Translate errors of CUDA and torch into errors a user can act on."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping

import torch

from devplace.errors import DeviceLostError, DeviceMemoryError, ExecutionError
from devplace.units import format_bytes

# After one of these every later CUDA call of the process fails.
LASTING = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "invalid program counter",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "uncorrectable",
    "device is lost",
    "fallen off the bus",
    "nvlink",
    "mps client",
)
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or one that led to it, is about device memory."""
    return any(
        isinstance(cause, torch.OutOfMemoryError) or "out of memory" in str(cause).lower()
        for cause in _causes(error)
    )


def is_lasting(error: BaseException) -> bool:
    """Whether every later CUDA call of the process will fail too."""
    texts = (str(cause).lower() for cause in _causes(error))
    return any(phrase in text for text in texts for phrase in LASTING)


def lost_device_error(what: str, error: BaseException) -> DeviceLostError:
    """The error for a device that is lost to this process."""
    reason = next(
        line
        for cause in _causes(error)
        for line in (str(cause).splitlines() or [""])[:1]
        if cause is error or is_lasting(cause)
    )
    return DeviceLostError(
        f"{what} made a GPU unusable for this process: {reason.rstrip('.')}. The usual reasons are "
        "an index out of range (embedding, gather, cross entropy) and a faulty kernel; CUDA tells "
        "it late, so it may be of an earlier op. Restart the process; the model and the optimizer "
        "are as of the last sync. Run with CUDA_LAUNCH_BLOCKING=1 to see which op it was."
    )


def memory_error(
    what: str, error: BaseException, predicted_bytes: Mapping[str, int], names: tuple[str, ...]
) -> DeviceMemoryError:
    """The error for a step that found too little memory.

    Args:
        what: Which part of the work needed it, such as `Capturing the step`.
        error: What torch raised.
        predicted_bytes: Device name -> peak that the plan predicted; may be empty.
        names: Names of the devices in use.
    """
    text = " ".join(str(cause) for cause in _causes(error))
    device = _device_in(text, names)
    wanted = _amount(r"Tried to allocate ([\d.]+) (\w+)", text)
    limit = _limit_bytes(device)
    predicted = predicted_bytes.get(device, 0)
    told = [f"{what} needed more memory than {device or 'a device'} has"]
    if wanted:
        told.append(f"{format_bytes(wanted)} more were asked for")
    if limit:
        told.append(f"the process may use {format_bytes(limit)}")
    if predicted:
        told.append(f"the plan predicted a peak of {format_bytes(predicted)}")
    return DeviceMemoryError(
        f"{'; '.join(told)}. What the step held was given back and its state is lost; model and "
        "optimizer are untouched. Plan with a smaller limit for this device, more devices, a "
        "smaller batch or more micro-batches; or free memory there and load the state again.",
        device,
        wanted,
        limit,
        predicted,
    )


def forget_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold: tensors of a step that failed, above all."""
    for cause in _causes(error):
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None


def step_error(number: int, error: BaseException) -> ExecutionError:
    """Any other failure of a step."""
    if isinstance(error, ExecutionError):
        return error
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return ExecutionError(f"Step {number} failed: {reason}. The state is lost; load it again.")


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    now: BaseException | None = error
    while now is not None and now not in found:
        found.append(now)
        now = now.__cause__ or now.__context__
    return found


def _device_in(text: str, names: tuple[str, ...]) -> str:
    gpu = re.search(r"GPU (\d+)", text)
    if gpu and f"cuda:{gpu[1]}" in names:
        return f"cuda:{gpu[1]}"
    named = [name for name in names if re.search(rf"{re.escape(name)}\b", text)]
    return named[0] if named else names[0] if len(names) == 1 else ""


def _amount(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return round(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0


def _limit_bytes(device: str) -> int:
    try:
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * torch.cuda.get_per_process_memory_fraction(device))
    except (RuntimeError, AssertionError, ValueError, AttributeError):
        return 0
