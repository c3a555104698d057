"""Runs plans for several GPUs on one: each of their devices is streams and memory of its own there.

Numbers, transfers, flags and graphs are those of several GPUs; times and links are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from devplace.run.cuda import executor
from devplace.run.cuda.device import CudaDevice


@contextmanager
def one_gpu(name: str = "cuda:0") -> Iterator[None]:
    """Within, executors that are made take all CUDA devices of a plan to be this GPU.

    A device of a plan that waits for another keeps a multiprocessor busy; the rest is shared.

    Args:
        name: Its torch device.
    """

    def on_it(index: int, _: str, **options: Any) -> CudaDevice:
        return CudaDevice(index, name, **options)

    with (
        patch.object(executor, "CudaDevice", on_it),
        patch.object(executor, "_check_devices", lambda names: None),
        patch.object(executor, "have_peer_access", lambda src, dst: True),
    ):
        yield
