"""One tensor from a GPU into pinned host memory or back, on the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devplace.run.cuda.device import FLAG_STRIDE, Flags
from devplace.run.cuda.packing import num_span_bytes
from devplace.run.cuda.pinned import PinnedBoard
from devplace.run.cuda.push import WAIT_WIDTH, copy_by_engine, words_of

# From this size on the copy engine carries a tensor, bytes. Below, one block of a kernel does, so
# that it can also raise the flag.
HOST_ENGINE_BYTES = 64 * 1024


def send_to_host(source: Any, board: PinnedBoard, transfer: int, epoch: Any) -> None:
    """Carry a tensor into its buffer in host memory, then set its flag to `epoch`.

    Args:
        source: Tensor on the current GPU, laid out like the buffer.
        board: Buffers and flags.
        transfer: Which one.
        epoch: Steps begun, int32 `[1]` on the current GPU.
    """
    buffer, flag = board.buffers[transfer], board.flag(transfer)
    if num_span_bytes(buffer) >= HOST_ENGINE_BYTES:
        copy_by_engine(source, buffer, source.device)
        copy_by_engine(epoch, flag, source.device)
    else:
        _carry(source, buffer, flag, epoch, is_signal=True)


def fetch_from_host(board: PinnedBoard, transfer: int, buffer: Any, epoch: Any) -> None:
    """Carry a tensor from host memory into a buffer on the current GPU; it must have come."""
    source = board.buffers[transfer]
    if num_span_bytes(buffer) >= HOST_ENGINE_BYTES:
        copy_by_engine(source, buffer, buffer.device)
    else:
        _carry(source, buffer, board.flag(transfer), epoch, is_signal=False)


def wait_for_host(
    board: PinnedBoard, flags: Flags, transfers: Sequence[int], limit_ns: int
) -> None:
    """Spin on the current stream until all of these transfers have come; as `push.wait`.

    Args:
        board: Their flags, which lie side by side in this order.
        flags: Of the receiver; the transfers' places there lie side by side too.
        transfers: What is waited for.
        limit_ns: How long it spins at most.
    """
    from devplace.run.cuda import host_kernels

    for start in range(0, len(transfers), WAIT_WIDTH):
        some = transfers[start : start + WAIT_WIDTH]
        host_kernels.await_kernel[(1,)](
            board.flags,
            flags.epoch,
            flags.error,
            board.slots[some[0]],
            flags.slot(some[0]),
            len(some),
            limit_ns,
            WIDTH=WAIT_WIDTH,
            STRIDE=FLAG_STRIDE,
            num_warps=1,
        )


def _carry(source: Any, target: Any, flag: Any, epoch: Any, is_signal: bool) -> None:
    from devplace.run.cuda import host_kernels

    words, place = words_of(source), words_of(target)
    if words.dtype != place.dtype:
        words, place = words.view(torch.uint8), place.view(torch.uint8)
    count = int(words.numel())
    host_kernels.carry_kernel[(1,)](
        words,
        place,
        flag,
        epoch,
        count,
        -(-count // host_kernels.BLOCK),
        SIGNALS=is_signal,
        BLOCK=host_kernels.BLOCK,
        num_warps=host_kernels.WARPS,
    )
