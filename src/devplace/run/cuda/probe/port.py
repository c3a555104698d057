"""A GPU being probed: its buffers, and helpers that launch on several of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch

from devplace.errors import ExecutionError
from devplace.run.cuda.device import CudaDevice, Flags
from devplace.run.cuda.push import _driver
from devplace.run.cuda.timestamps import DeviceClock
from devplace.run.workers import Workers

WAIT_LIMIT_NS = 500_000_000
"""How long anything spins before it gives up: hops take some ms at most."""


class Port(CudaDevice):
    """A GPU with a tensor to send from and one to receive into.

    Attributes:
        out: Words to send, int32 `[largest / 4]`.
        into: Where they arrive on others, int32 `[largest / 4]`.
        flags: One flag, for single transfers.
    """

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index, name)
        self.name = name
        self.out: Any = None
        self.into: Any = None
        self.flags: Any = None

    def allocate(self, num_bytes: int) -> None:
        """Make the buffers."""
        with self.current():
            self.out = torch.zeros(num_bytes // 4, dtype=torch.int32, device=self.torch_device)
            self.into = torch.zeros_like(self.out)
            self.flags = Flags([0], self.torch_device)
        self.synchronize_all()

    def rehearse(self) -> None:
        """Run the kernels of the probe itself once, so that they are compiled and loaded."""
        from devplace.run.cuda.probe import probe_kernels

        with self.current():
            times = torch.zeros(2, dtype=torch.int64, device=self.torch_device)
            probe_kernels.span_kernel[(1,)](times, 0, num_warps=1)
            probe_kernels.spin_kernel[(1,)](times, 16_000, num_warps=1)
            DeviceClock(1, self.torch_device).stamp("begin")
            torch.zeros(1, device=self.torch_device).add_(1)
            self.flags.epoch.add_(1)
            self.flags.reset()
        self.synchronize_all()

    def synchronize_all(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.torch_device)


def pattern(num_words: int, seed: int, torch_device: Any) -> Any:
    """Words that look random and are the same wherever they are made; int32 `[num_words]`."""
    words = torch.arange(num_words, dtype=torch.int32, device=torch_device)
    words.mul_(-1640531527).add_(seed * 7919)
    words.bitwise_xor_(words >> 15)
    words.mul_(-2048144777)
    return words.bitwise_xor_(words >> 13)


def copy_bytes(target: Any, source: Any, num_bytes: int, stream: Any) -> None:
    """Have the copy engine copy between a GPU and pinned memory; torch does not track it."""
    status = _driver().cuMemcpyAsync(
        ctypes.c_uint64(target.data_ptr()),
        ctypes.c_uint64(source.data_ptr()),
        ctypes.c_size_t(num_bytes),
        ctypes.c_void_p(stream.cuda_stream),
    )
    if status != 0:
        raise ExecutionError(
            f"a copy of {num_bytes} bytes from {source.device} to {target.device} was refused by "
            f"the driver (CUDA error {status})"
        )


@contextmanager
def captured(port: Port) -> Iterator[Any]:
    """Capture what is done inside into a graph, on the device and its stream."""
    port.synchronize_all()
    with port.current():
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel met for the first time may still be loaded.
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            yield graph
        except BaseException:
            with suppress(RuntimeError):  # what made it fail is told instead
                graph.capture_end()
            raise
        graph.capture_end()


def launch(workers: Workers, jobs: Mapping[int, Callable[[], None]]) -> None:
    """Do a job per device, each in its own thread; returns when all are done."""
    done: SimpleQueue[BaseException | None] = SimpleQueue()

    def guarded(job: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                job()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        return run

    for index, job in jobs.items():
        workers.queues[index].put(guarded(job))
    errors = [done.get() for _ in jobs]
    for error in errors:
        if error is not None:
            raise error


def stamped(
    port: Port, record: Callable[[DeviceClock], None], most: int, replays: int
) -> list[list[int]]:
    """Capture a graph with stamps and replay it; stamps of every replay but the first, ns."""
    with port.current():
        clock = DeviceClock(most, port.torch_device)
    with captured(port) as graph:
        record(clock)
    found = []
    for _ in range(replays + 1):
        with port.current():
            graph.replay()
        port.synchronize_all()
        found.append([when for _, _, when in clock.records()])
    return found[1:]


def least_gaps(stamps: Sequence[Sequence[int]]) -> list[int]:
    """Time from each stamp to the next, the least of all replays, ns."""
    gaps = [[b - a for a, b in pairwise(row)] for row in stamps]
    return [min(column) for column in zip(*gaps, strict=True)]
