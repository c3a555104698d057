"""Buffers and flags in pinned host memory, shared by the CPU and all GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from devplace.run.copies import pack_tensor
from devplace.run.cuda.device import FLAG_STRIDE
from devplace.run.cuda.packing import Packing, num_span_bytes, shaped
from devplace.run.cuda.push import same_layout, words_of

# Buffers begin at multiples of this, bytes, so that kernels can load them in wide words.
ALIGNMENT = 256
# From this size on a buffer is an allocation of its own: torch rounds each up to a power of two.
OWN_BYTES = 2**20
# A thread that waits looks again at once this long, ns; then it sleeps between two looks, s.
EAGER_NS = 2_000_000
NAP_S = 50e-6

Allocate = Callable[[int], Any]


def pinned_bytes(num_bytes: int) -> Any:
    """Zeros in pinned host memory: uint8 `[num_bytes]`; the current GPU makes its context."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


def plain_bytes(num_bytes: int) -> Any:
    """As `pinned_bytes`, in memory that only the CPU can reach."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


class PinnedBoard:
    """A buffer and a flag for every transfer that goes through host memory.

    A flag holds the number of the last step whose tensor is in the buffer. It has one writer, who
    fills the buffer first. Buffers begin as zeros.

    Args:
        layouts: Transfer -> a tensor (on any device) laid out as what crosses, in the order of
            their flags.
        allocate: Gives zeroed bytes (others than pinned ones for tests without a GPU).

    Attributes:
        slots: Transfer -> place of its flag.
        flags: int32, FLAG_STRIDE words apart.
        buffers: Transfer -> its tensor.
    """

    def __init__(self, layouts: Mapping[int, Any], allocate: Allocate = pinned_bytes) -> None:
        self.slots = {transfer: slot for slot, transfer in enumerate(layouts)}
        self.flags = allocate(4 * FLAG_STRIDE * max(1, len(layouts))).view(torch.int32)
        self._words = self.flags.numpy()
        self.buffers = self._make_buffers(layouts, allocate)
        self._storages = {b.untyped_storage().data_ptr() for b in self.buffers.values()}
        self._lock = threading.Lock()

    def flag(self, transfer: int) -> Any:
        """The flag of a transfer, int32 `[1]`."""
        at = self.slots[transfer] * FLAG_STRIDE
        return self.flags[at : at + 1]

    def post(self, transfer: int, step: int) -> None:
        """Say, from the CPU, that the buffer is filled."""
        self._fence()
        self._words[self.slots[transfer] * FLAG_STRIDE] = step

    def send(self, transfer: int, value: Any, step: int) -> None:
        """Fill the buffer with a CPU tensor and say so."""
        fill(self.buffers[transfer], value)
        self.post(transfer, step)

    def wait(self, transfer: int, step: int, limit_ns: int, stop: Sequence[Any] = ()) -> bool:
        """Wait, on the CPU, until the buffer is filled.

        Args:
            transfer: What is waited for.
            step: Number of the step.
            limit_ns: How long it waits at most.
            stop: It also ends as soon as there is something in it.

        Returns:
            Whether the tensor has come.
        """
        at = self.slots[transfer] * FLAG_STRIDE
        words = self._words
        if words[at] < step:
            begin = time.perf_counter_ns()
            while words[at] < step:
                spent = time.perf_counter_ns() - begin
                if stop or spent > limit_ns:
                    return False
                time.sleep(0 if spent < EAGER_NS else NAP_S)  # lets other threads run
        self._fence()
        return True

    def holds(self, value: Any) -> bool:
        """Whether a tensor lies in a buffer."""
        return value.untyped_storage().data_ptr() in self._storages

    def reset(self) -> None:
        """Flags as new; nothing may be running."""
        self.flags.zero_()

    def _fence(self) -> None:
        """Keep loads and stores before it before those after it, on processors that reorder."""
        with self._lock:
            pass

    @staticmethod
    def _make_buffers(layouts: Mapping[int, Any], allocate: Allocate) -> dict[int, Any]:
        sizes = {transfer: num_span_bytes(like) for transfer, like in layouts.items()}
        pieces = Packing({t: size for t, size in sizes.items() if size < OWN_BYTES}, ALIGNMENT)
        memory = allocate(max(ALIGNMENT, pieces.num_bytes))
        buffers = {}
        for transfer, like in layouts.items():
            buffer = pieces.cut(memory, transfer, like)
            if buffer is None:
                size = sizes[transfer]
                buffer = shaped(allocate(size) if size else memory[:0], like)
            buffers[transfer] = buffer
        return buffers


def fill(buffer: Any, value: Any) -> None:
    """Copy a CPU tensor into a buffer of the same shape, which may repeat elements."""
    if buffer.numel() == 0:
        return
    packed = value if same_layout(value, buffer) else pack_tensor(value)
    if same_layout(packed, buffer):
        words_of(buffer).copy_(words_of(packed))
        return
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0:
            buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    buffer.copy_(value)
