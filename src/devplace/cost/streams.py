"""A pool of CUDA streams, since libraries keep a workspace for each stream."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

_idle: dict[str, list[Any]] = {}
_buffer_bytes: dict[str, int] = {}


def take(name: str) -> Any:
    """A stream that nobody else uses, with the work buffers of libraries made if they fit.

    Args:
        name: Name of the torch device, such as `cuda:0`.
    """
    key = str(torch.device(name))
    idle = _idle.setdefault(key, [])
    if idle:
        return idle.pop()
    stream = torch.cuda.Stream(key)
    before = int(torch.cuda.memory_allocated(key))
    with suppress(torch.OutOfMemoryError):  # whoever works on the stream will say so
        make_work_buffers(stream)
    made = int(torch.cuda.memory_allocated(key)) - before
    _buffer_bytes[key] = max(made, _buffer_bytes.get(key, 0))
    return stream


def give_back(stream: Any) -> None:
    """Leave a stream to others; nothing may be started on it any more."""
    _idle[str(stream.device)].append(stream)


def make_work_buffers(stream: Any) -> None:
    """Let libraries make the buffers that they keep for a stream, in memory of their own.

    `torch.cuda.stream` alone would end by setting the device that was current, and so make a
    context there even if nothing ever used it; `torch.cuda.device` does not.

    Raises:
        torch.OutOfMemoryError: There is no room for them.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(512, 512, dtype=dtype, device=stream.device)
            bias = torch.zeros(512, dtype=dtype, device=stream.device)
            torch.mm(x, x)
            torch.addmm(bias, x, x)
        del x, bias
        stream.synchronize()


def work_buffer_bytes(name: str) -> int:
    """What libraries keep of a device once matrices are multiplied on a stream, bytes.

    Args:
        name: Name of the torch device. It is touched, which takes memory for good; the stream
            serves the next step.
    """
    key = str(torch.device(name))
    if key not in _buffer_bytes:
        give_back(take(key))
    return _buffer_bytes[key]
