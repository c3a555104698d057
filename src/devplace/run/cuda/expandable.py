"""Switch torch's allocator to expandable segments during warm-up and capture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

NAME = "expandable_segments"
# Larger than what torch gives out of one piece for small tensors, so that it is a piece of its own.
PROBE_BYTES = 20 * 2**20


@contextmanager
def expandable_segments(device: str) -> Iterator[bool]:
    """Memory asked for meanwhile comes in pages of segments that grow, where torch can do that.

    A freed page serves wherever memory is needed next, so little is lost to gaps. Tensors that
    peers store into are to be made outside of this. Afterwards the user's settings hold again.

    Args:
        device: Name of a GPU, to try it on.

    Yields:
        Whether it is so; if not, memory comes as ever.
    """
    former = _settings()
    if not _can_expand(device) or not _set(turned_on(former)):
        yield False
        return
    try:
        yield True
    finally:
        _set(turned_back(former))


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Within `expandable_segments`: memory asked for meanwhile comes in pieces of its own size."""
    former = _settings()
    if NAME not in former or not _set(turned_off(former)):
        yield
        return
    try:
        yield
    finally:
        _set(former)


def turned_off(former: str) -> str:
    """Allocator settings as they were, without segments that grow; what comes last holds."""
    return f"{former},{NAME}:False"


def turned_on(former: str) -> str:
    """Allocator settings as they were, with segments that grow."""
    return f"{former},{NAME}:True" if former else f"{NAME}:True"


def turned_back(former: str) -> str:
    """The former allocator settings; what they do not name is off, as it is by default."""
    if NAME in former:
        return former
    return f"{former},{NAME}:False" if former else f"{NAME}:False"


def _settings() -> str:
    try:
        return str(torch._C._accelerator_getAllocatorSettings())
    except (AttributeError, RuntimeError):
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _set(settings: str) -> bool:
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    try:
        (setter or torch.cuda.memory._set_allocator_settings)(settings)
    except (AttributeError, RuntimeError, ValueError):
        return False
    return True


@cache
def _can_expand(device: str) -> bool:
    """Whether torch and driver know such segments: one is made and let go."""
    if torch.cuda.get_allocator_backend() != "native":
        return False
    former = _settings()
    where = torch.device(device)
    if not _set(turned_on(former)):
        return False
    try:
        with torch.cuda.device(where), torch.cuda.stream(torch.cuda.Stream(where)):
            torch.empty(PROBE_BYTES, dtype=torch.uint8, device=where)
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
    finally:
        _set(turned_back(former))
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return True
