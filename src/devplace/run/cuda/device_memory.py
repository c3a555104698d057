"""Measure the memory of a step on each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from devplace.cost.streams import work_buffer_bytes
from devplace.run.cuda.arena import Arena
from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.expandable import fixed_segments

# torch's allocator gives blocks up to 1 MiB out of pieces of 2 MiB, larger ones out of 20 MiB or
# their own; one piece of memory for all is worth it from here on.
MIN_ARENA_BYTES = 20 * 2**20
# What a step reserves beyond its tensors: flags and other small ones in pages of 2 MiB, up to 20
# MiB for the last page that a segment grew by, ends of the pieces of parameters and of receive
# buffers.
SPARE_BYTES = 24 * 2**20


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one GPU.

    Attributes:
        device: Name.
        step_peak_bytes: Most that tensors and work buffers take at once in a captured step, with
            all that is held between steps; 0 if nothing was captured.
        reserved_bytes: What torch holds of the device now.
        reserved_peak_bytes: The most it held since the executor was made, warm-up included.
        allocated_bytes: What tensors and work buffers take now.
        pool_bytes: Held for the captured step alone.
        outside_bytes: In use beside that: contexts, loaded kernels, other processes.
    """

    device: str
    step_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    allocated_bytes: int
    pool_bytes: int
    outside_bytes: int


class MemoryMeter:
    """Peak of a device's allocations above 1 MiB, apart from tensors it receives.

    It resets torch's peak counters of the device.

    Args:
        device: The device.

    Attributes:
        received: Received tensors; they are kept, so that they can be told from the rest.
        reserved_peak_bytes: Most that torch held of the device meanwhile.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.received: list[Any] = []
        self._device = device
        self._begin = self._read("current")
        self._received_bytes = 0
        self._peak = 0
        self.reserved_peak_bytes = 0
        self._restart()

    @contextmanager
    def keeping_received(self) -> Iterator[None]:
        """Around the allocation of a received tensor."""
        before = self._note_peak()
        yield
        self._received_bytes += self._read("current") - before
        self._restart()

    def peak_bytes(self) -> int:
        """Peak above what was there before and above what stays."""
        self._note_peak()
        self._device.synchronize()
        stays = self._read("current") - self._begin - self._received_bytes
        return max(0, self._peak - self._begin - stays)

    def _note_peak(self) -> int:
        """Take the peaks over; gives what is allocated now, bytes."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device.torch_device)
        if not stats:
            return 0
        large = stats["allocated_bytes"]["large_pool"]
        self._peak = max(self._peak, int(large["peak"]) - self._received_bytes)
        reserved = int(stats["reserved_bytes"]["all"]["peak"])
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, reserved)
        return int(large["current"])

    def _read(self, which: str) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device.torch_device)
        return int(stats["allocated_bytes"]["large_pool"][which]) if stats else 0

    def _restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device.torch_device)


def allowed_bytes(device: CudaDevice) -> int:
    """What this process may still take of a GPU, under its limit and beside other processes."""
    where = device.torch_device
    free, total = torch.cuda.mem_get_info(where)
    may = int(total * torch.cuda.get_per_process_memory_fraction(where))
    return max(0, min(int(free), may - int(torch.cuda.memory_reserved(where))))


def reserve_arena(device: CudaDevice, arena: Arena) -> None:
    """Get memory in one piece for the allocations that follow on the current stream and pool.

    Without room for it they get their memory piece by piece. A piece that grows by pages would be
    rounded up to one, at the cost of small tensors, so the last of the memory comes in one piece.
    """
    if arena.num_bytes >= MIN_ARENA_BYTES:
        try:
            with fixed_segments() if arena.is_fixed else nullcontext():
                piece = torch.empty(arena.num_bytes, dtype=torch.uint8, device=device.torch_device)
                del piece
        except torch.OutOfMemoryError:
            pass
    torch.cuda.reset_peak_memory_stats(device.torch_device)


def max_allocated_bytes(device: CudaDevice) -> int:
    """Peak of allocations since torch's counters were last reset."""
    return int(torch.cuda.max_memory_allocated(device.torch_device))


def pool_memory(device: CudaDevice, pool: Any) -> tuple[int, int]:
    """(reserved, in use) of one memory pool, bytes."""
    reserved = used = 0
    for segment in torch.cuda.memory_snapshot():
        is_here = segment["device"] == device.torch_device.index
        if is_here and tuple(segment.get("segment_pool_id", ())) == tuple(pool):
            reserved += int(segment["total_size"])
            used += int(segment["allocated_size"])
    return reserved, used


def device_memory(
    device: CudaDevice, step_peak_bytes: int, reserved_peak_bytes: int, pool_bytes: int
) -> DeviceMemory:
    """The memory of a device now, with peaks noted before."""
    where = device.torch_device
    free, total = torch.cuda.mem_get_info(where)
    reserved = int(torch.cuda.memory_reserved(where))
    return DeviceMemory(
        device=str(where),
        step_peak_bytes=step_peak_bytes,
        reserved_bytes=reserved,
        reserved_peak_bytes=max(reserved, reserved_peak_bytes),
        allocated_bytes=int(torch.cuda.memory_allocated(where)),
        pool_bytes=pool_bytes,
        outside_bytes=max(0, int(total - free) - reserved),
    )


def held_bytes(name: str) -> int:
    """What a step holds of a GPU beside the tensors of the plan, for `CostTable.held_bytes`.

    Work buffers of libraries, and `SPARE_BYTES`.

    Args:
        name: Name of the torch device. It is touched, which takes memory for good; GPUs of the same
            kind need no asking.
    """
    return work_buffer_bytes(name) + SPARE_BYTES
