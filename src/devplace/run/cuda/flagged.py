"""Transfers inside CUDA graphs: pushes beside the ops, waits among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from devplace.run.copies import clone_tensor
from devplace.run.cuda.device import CudaDevice, Flags, empty_like_layout
from devplace.run.cuda.push import Push, num_span_bytes, same_layout, wait
from devplace.run.schedule import Schedule

# Tensors being pushed keep their memory until the ops are known to come after the push.
MOST_HELD_BYTES = 512 * 2**20


class _Pending(NamedTuple):
    transfer: int
    held: Any
    num_bytes: int
    event: Any


class Mailroom:
    """Receive buffers and flags of all transfers of a schedule.

    Args:
        schedule: What every device does.
        devices: The GPUs that do something, by index.
        layouts: Transfer -> a tensor (on any device) laid out as what crosses.
        push: Carries one tensor (another one for tests of faulty links).
        wait_limit_s: How long a tensor may be waited for, s.
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Mapping[int, CudaDevice],
        layouts: Mapping[int, Any],
        push: Push,
        wait_limit_s: float,
    ) -> None:
        self.schedule = schedule
        self.limit_ns = round(wait_limit_s * 1e9)
        self.push = push
        self.blocks: dict[int, int] = {}
        self.buffers: dict[int, Any] = {}
        arriving: dict[int, list[int]] = {index: [] for index in devices}
        for transfer, record in enumerate(schedule.transfers):
            arriving[record.dst].append(transfer)
        self.flags: dict[int, Flags] = {}
        for index, device in devices.items():
            with device.current():
                self.flags[index] = Flags(arriving[index], device.torch_device)
                for transfer in arriving[index]:
                    self.buffers[transfer] = empty_like_layout(
                        layouts[transfer], device.torch_device
                    )
            device.synchronize()
        self._rehearse(devices)

    def reset(self) -> None:
        """Flags as new; nothing may be running."""
        for flags in self.flags.values():
            flags.reset()

    def flag(self, transfer: int) -> Any:
        """Flag of a transfer, on its receiver."""
        return self.flags[self.schedule.transfers[transfer].dst].flag(transfer)

    def _rehearse(self, devices: Mapping[int, CudaDevice]) -> None:
        """Push everything once: compiles and loads the kernels, and counts their blocks."""
        for transfer, record in enumerate(self.schedule.transfers):
            buffer = self.buffers[transfer]
            if buffer.numel():
                with devices[record.src].current():
                    like = empty_like_layout(buffer, devices[record.src].torch_device)
                    self.blocks[transfer] = self.push(like, buffer, self.flag(transfer))
        for index, device in devices.items():
            flags = self.flags[index]
            with device.current():
                wait(flags.error, flags.epoch, 1, flags.error, 0, self.limit_ns)
        for device in devices.values():
            device.synchronize()
        self.reset()
        for device in devices.values():
            torch.cuda.synchronize(device.torch_device)


class FlagCarrier:
    """Sends and receives of one device while its graph is captured.

    Args:
        mailroom: Buffers and flags.
        device: The device.
        joins: Of `joined_before`.
    """

    def __init__(
        self, mailroom: Mailroom, device: CudaDevice, joins: Mapping[int, tuple[int, ...]]
    ) -> None:
        self._mailroom = mailroom
        self._device = device
        self._joins = joins
        self._sides: dict[int, Any] = {}
        self._pending: dict[int, deque[_Pending]] = {}
        self._joined: set[int] = set()
        self._held_bytes = 0

    def send(self, transfer: int, value: Any) -> None:
        """Push a tensor on a stream beside the ops."""
        buffer = self._mailroom.buffers[transfer]
        if buffer.numel() == 0:
            self._joined.add(transfer)
            return
        dst = self._mailroom.schedule.transfers[transfer].dst
        if dst not in self._sides:
            self._sides[dst] = torch.cuda.Stream(self._device.torch_device)
            self._pending[dst] = deque()
        side = self._sides[dst]
        side.wait_stream(self._device.main)
        with torch.cuda.stream(side):
            source = value if same_layout(value, buffer) else self._relaid(value, buffer)
            self._mailroom.push(source, buffer, self._mailroom.flag(transfer))
            event = side.record_event()
        num_bytes = num_span_bytes(buffer)
        self._pending[dst].append(_Pending(transfer, (value, source), num_bytes, event))
        self._held_bytes += num_bytes
        while self._held_bytes > MOST_HELD_BYTES:
            self._join_first(max(self._pending, key=lambda k: len(self._pending[k])))

    def receive(self, transfer: int) -> Any:
        """Wait for a tensor in the stream of the ops."""
        for send in self._joins[transfer]:
            dst = self._mailroom.schedule.transfers[send].dst
            while send not in self._joined:
                self._join_first(dst)
        buffer = self._mailroom.buffers[transfer]
        if buffer.numel():
            flags = self._mailroom.flags[self._device.index]
            blocks, limit = self._mailroom.blocks[transfer], self._mailroom.limit_ns
            wait(flags.flag(transfer), flags.epoch, blocks, flags.error, transfer + 1, limit)
        return buffer

    def finish(self) -> None:
        """Let the ops' stream wait for every push."""
        for dst, pending in self._pending.items():
            while pending:
                self._join_first(dst)

    def _join_first(self, dst: int) -> None:
        first = self._pending[dst].popleft()
        self._device.main.wait_event(first.event)
        self._joined.add(first.transfer)
        self._held_bytes -= first.num_bytes

    def _relaid(self, value: Any, buffer: Any) -> Any:
        dense = clone_tensor(value)
        if same_layout(dense, buffer):
            return dense
        staged = empty_like_layout(buffer, value.device)
        staged.copy_(value)
        return staged
