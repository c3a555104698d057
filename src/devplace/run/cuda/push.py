"""Push a tensor into another GPU's buffer and raise its arrival flag."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from devplace.errors import ExecutionError
from devplace.run.cuda.device import FLAG_STRIDE, Flags
from devplace.run.cuda.packing import num_span_bytes, num_span_elements
from devplace.schedule.rough_times import COPY_ENGINE_BYTES

# Blocks of a push kernel. The same step took 31.9 ms with 8, 29.6 with 16, 28.8 with 32, 28.4 with
# 64 and 28.7 with 128; one of NMT-4 was fastest with 32.
MAX_BLOCKS = 32
# Transfers that one wait kernel looks after, one per thread.
WAIT_WIDTH = 32

Push = Callable[[Any, Any, Any, Any], int]


def push(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
    """Carry `source` into `buffer` on the current stream of the sender, then raise `flag`.

    Args:
        source: Tensor on the sender, laid out like the buffer.
        buffer: Tensor on the receiver.
        flag: int32 counter on the receiver.
        epoch: Steps begun, int32 `[1]` on the sender; the receiver has begun as many.

    Returns:
        How much the flag grows by in a step.
    """
    if num_span_bytes(buffer) >= COPY_ENGINE_BYTES:
        return push_by_engine(source, buffer, flag, epoch)
    return push_by_kernel(source, buffer, flag, epoch)


def push_by_kernel(
    source: Any, buffer: Any, flag: Any, epoch: Any = None, most_blocks: int = MAX_BLOCKS
) -> int:
    """As `push`, by a kernel that stores into peer memory."""
    from devplace.run.cuda import kernels

    words, target = words_of(source), words_of(buffer)
    if words.dtype != target.dtype:
        words, target = words.view(torch.uint8), target.view(torch.uint8)
    count = int(words.numel())
    pieces = -(-count // kernels.BLOCK)
    rounds = -(-pieces // most_blocks)
    blocks = -(-pieces // rounds)
    kernels.push_kernel[(blocks,)](
        words, target, flag, count, rounds, BLOCK=kernels.BLOCK, num_warps=kernels.WARPS
    )
    return blocks


def push_by_engine(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
    """As `push`, by the copy engine.

    It also copies the epoch onto the flag: a kernel that raised it would wait for a free
    multiprocessor, beside a large product of matrices for some milliseconds.
    """
    copy_by_engine(source, buffer, source.device)
    copy_by_engine(epoch, flag, source.device)
    return 1


def copy_by_engine(source: Any, target: Any, stream_device: Any) -> None:
    """Copy a stretch of memory into one just as long, on the current stream of a device.

    Raises:
        ExecutionError: The driver refused.
    """
    stream = torch.cuda.current_stream(stream_device).cuda_stream
    status = _driver().cuMemcpyAsync(
        ctypes.c_uint64(target.data_ptr()),
        ctypes.c_uint64(source.data_ptr()),
        ctypes.c_size_t(num_span_bytes(target)),
        ctypes.c_void_p(stream),
    )
    if status != 0:
        raise ExecutionError(
            f"A copy of {num_span_bytes(target)} bytes from {source.device} to {target.device} "
            f"was refused by the driver (CUDA error {status}). Check peer access between them."
        )


def wait(flags: Flags, transfers: Sequence[int], limit_ns: int) -> None:
    """Spin on the current stream until all of these transfers have come.

    After `limit_ns`, or once an error is noted, it goes on all the same and leaves a note.

    Args:
        flags: Of the receiver.
        transfers: Transfers whose flags lie side by side, in this order.
        limit_ns: How long it spins at most.
    """
    from devplace.run.cuda import kernels

    first = flags.slot(transfers[0])
    for start in range(0, len(transfers), WAIT_WIDTH):
        count = min(WAIT_WIDTH, len(transfers) - start)
        kernels.wait_kernel[(1,)](
            flags.counters,
            flags.blocks,
            flags.epoch,
            flags.error,
            first + start,
            count,
            limit_ns,
            WIDTH=WAIT_WIDTH,
            STRIDE=FLAG_STRIDE,
            num_warps=1,
        )


def same_layout(value: Any, buffer: Any) -> bool:
    """Whether a tensor's elements lie as in the buffer, dimensions of size 1 aside."""
    pairs = zip(value.shape, value.stride(), buffer.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in pairs)


def words_of(tensor: Any) -> Any:
    """The tensor's stretch of storage as int32 words, or as bytes if it does not divide."""
    span = torch.as_strided(tensor, (num_span_elements(tensor),), (1,), tensor.storage_offset())
    num_bytes = span.numel() * span.element_size()
    if num_bytes % 4 == 0 and span.data_ptr() % 4 == 0 and span.element_size() != 1:
        return span.view(torch.int32)
    return span.view(torch.uint8)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
