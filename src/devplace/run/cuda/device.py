"""A GPU in a plan: its streams, flags and values kept between steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from devplace.cost import streams
from devplace.run.copies import shrunk_strides
from devplace.run.cuda.packing import Packing

FLAG_STRIDE = 32  # int32 words: flags lie 128 bytes apart, in cache lines of their own


class CudaDevice:
    """What the executor holds of one GPU.

    Args:
        index: Its index in the schedule.
        name: Its torch device.
        source_bytes: Source op that it will hold -> bytes of its value.
        inputs: Source ops of the batch.

    Attributes:
        index: Its index in the schedule.
        torch_device: Its torch device.
        main: Stream of its ops.
        buffers: Source op -> its value between steps; the address stays.
    """

    def __init__(
        self,
        index: int,
        name: str,
        source_bytes: Mapping[int, int] | None = None,
        inputs: Collection[int] = (),
    ) -> None:
        self.index = index
        self.torch_device = torch.device(name)
        self.main = streams.take(name)
        self.buffers: dict[int, Any] = {}
        self._source_bytes = dict(source_bytes or {})
        self._pieces = Packing({})
        self._inputs = frozenset(inputs)
        self._memory: Any = None
        self._read_from: set[Any] = set()  # streams of users whose values were put since
        self._fetching: dict[Any, Any] = {}  # GPU -> stream there that copies its values to here

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device and its stream the current ones.

        `torch.cuda.stream` alone would end by setting the device that was current, and so make a
        context there even if nothing ever used it; `torch.cuda.device` does not.
        """
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self.main):
            yield

    def put(self, op: int, value: Any) -> None:
        """Copy a value into the buffer of a source op, behind all work so far."""
        value = value.detach()
        if value.is_cuda:
            users = torch.cuda.current_stream(value.device)
            self.main.wait_stream(users)
            if op in self._inputs:
                self._read_from.add(users)
        with self._from(value), self.current():
            if op not in self.buffers:
                self.buffers[op] = self._room_for(op, value)
            # Pinned memory is read later, when its owner may have changed it.
            is_pinned = value.device.type == "cpu" and value.is_pinned()
            self.buffers[op].copy_(value, non_blocking=not is_pinned)
            if value.device == self.torch_device:
                value.record_stream(self.main)

    def share(self, op: int, buffer: Any) -> None:
        """Keep a source in the buffer of another step's device, which must be idle; once this one
        has a buffer of its own, the value is copied."""
        if self.buffers.setdefault(op, buffer) is not buffer:
            self.put(op, buffer)

    def let_users_write(self) -> None:
        """Let what the user does next with a batch on a GPU wait until it is read.

        Called once all devices have been given their values: they wait for the user's stream, and
        must not wait for each other through it.
        """
        for users in self._read_from:
            users.wait_stream(self._fetching.get(users.device, self.main))
        self._read_from.clear()

    @contextmanager
    def _from(self, value: Any) -> Iterator[None]:
        """Copy values of other GPUs on a stream of theirs that nothing else uses.

        Torch lets a copy wait for both GPUs on the current stream of the sender: were that the
        caller's, the next step would wait until all devices are through with this one.
        """
        if not value.is_cuda or value.device == self.torch_device:
            yield
            return
        stream = self._fetching.get(value.device)
        if stream is None:
            stream = self._fetching[value.device] = torch.cuda.Stream(value.device)
        stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.device(value.device), torch.cuda.stream(stream):
            yield
        value.record_stream(stream)

    def _room_for(self, op: int, value: Any) -> Any:
        """Memory for the value of a source: a cut of one piece for all, or its own."""
        like = _dense_like(value)
        if self._memory is None:
            sizes = {k: n for k, n in self._source_bytes.items() if k not in self.buffers}
            self._pieces = Packing(sizes)
            size = self._pieces.num_bytes
            self._memory = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        place = self._pieces.cut(self._memory, op, like)
        return empty_like_layout(like, self.torch_device) if place is None else place

    def release(self) -> None:
        """Let go of all values."""
        self.buffers.clear()
        self._memory = None

    def hand_over(self, value: Any) -> Any:
        """A value of this device's stream, made safe to use on the caller's."""
        users = torch.cuda.current_stream(self.torch_device)
        users.wait_stream(self.main)
        value.record_stream(users)
        return value

    def synchronize(self) -> None:
        """Wait for everything started here."""
        self.main.synchronize()

    def give_up_stream(self) -> None:
        """Leave the stream to others; nothing may be started here any more."""
        streams.give_back(self.main)


class Flags:
    """Arrival flags and step counter of one receiver.

    Args:
        transfers: Transfers in the order they are received.
        torch_device: The receiver.

    Attributes:
        slots: Transfer -> place of its counter.
        counters: Counters that pushes count up, FLAG_STRIDE words apart; int32.
        blocks: How much a push adds to each counter, int32 `[num_transfers]`.
        epoch: Steps begun, int32 `[1]`; the device's own graph counts it up.
        error: 1 + the slot of a transfer that did not come in time, or 0; int32 `[1]`.
        host_error: Copy of `error` in pinned host memory, as of the last step.
    """

    def __init__(self, transfers: list[int], torch_device: Any) -> None:
        self._transfers = transfers
        self.slots = {transfer: k for k, transfer in enumerate(transfers)}
        count = max(1, len(transfers))
        self.counters = torch.zeros(count * FLAG_STRIDE, dtype=torch.int32, device=torch_device)
        self.blocks = torch.ones(count, dtype=torch.int32, device=torch_device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=torch_device)
        self.error = torch.zeros(1, dtype=torch.int32, device=torch_device)
        self.host_error = torch.zeros(1, dtype=torch.int32).pin_memory()

    def slot(self, transfer: int) -> int:
        """Place of a transfer's counter."""
        return self.slots[transfer]

    def counter(self, transfer: int) -> Any:
        """The counter of a transfer."""
        at = self.slots[transfer] * FLAG_STRIDE
        return self.counters[at : at + 1]

    def set_blocks(self, blocks: Mapping[int, int]) -> None:
        """Note how much the push of each transfer adds to its counter."""
        if self._transfers:
            found = [blocks.get(transfer, 0) for transfer in self._transfers]
            self.blocks.copy_(torch.tensor(found, dtype=torch.int32))

    def late_transfer(self) -> int | None:
        """The transfer that did not come in time in a step that has ended."""
        code = int(self.host_error)
        return self._transfers[code - 1] if code else None

    def reset(self) -> None:
        """As new; nothing may be running."""
        for tensor in (self.counters, self.epoch, self.error, self.host_error):
            tensor.zero_()


def empty_like_layout(like: Any, torch_device: Any) -> Any:
    """Uninitialised tensor on another device with the same shape, strides and dtype."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=torch_device)


def _dense_like(value: Any) -> Any:
    """Meta tensor with the dimensions of a value in the same order, without gaps."""
    strides = shrunk_strides(value.shape, value.stride(), gap=0)
    if strides is None or 0 in strides:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")
