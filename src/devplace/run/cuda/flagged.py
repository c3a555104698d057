"""Transfers inside CUDA graphs: pushes beside the ops, waits among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from devplace.run.copies import pack_tensor
from devplace.run.cuda.clock import DeviceClock, timed_transfer
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
        self.buffers: dict[int, Any] = {}
        self.flags: dict[int, Flags] = {}
        for index, device in devices.items():
            arriving = [t for kind, _, t in schedule.instructions[index] if kind == "receive"]
            with device.current():
                self.flags[index] = Flags(arriving, device.torch_device)
                for transfer in arriving:
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
        return self.flags[self.schedule.transfers[transfer].dst].counter(transfer)

    def _rehearse(self, devices: Mapping[int, CudaDevice]) -> None:
        """Push everything once: compiles and loads the kernels, and counts their blocks."""
        blocks: dict[int, int] = {}
        for transfer, record in enumerate(self.schedule.transfers):
            buffer = self.buffers[transfer]
            if buffer.numel():
                with devices[record.src].current():
                    like = empty_like_layout(buffer, devices[record.src].torch_device)
                    blocks[transfer] = self.push(like, buffer, self.flag(transfer))
        for device in devices.values():
            device.synchronize()
        self.reset()
        for device in devices.values():
            torch.cuda.synchronize(device.torch_device)
        for index, device in devices.items():
            arriving = [t for t, r in enumerate(self.schedule.transfers) if r.dst == index]
            with device.current():
                self.flags[index].set_blocks(blocks)
                if arriving:
                    wait(self.flags[index], arriving[:1], self.limit_ns)
            torch.cuda.synchronize(device.torch_device)


class FlagCarrier:
    """Sends and receives of one device while its graph is captured.

    Args:
        mailroom: Buffers and flags.
        device: The device.
        joins: Of `joined_before`.
        clock: Takes the time of pushes, if there is one.
    """

    def __init__(
        self,
        mailroom: Mailroom,
        device: CudaDevice,
        joins: Mapping[int, tuple[int, ...]],
        clock: DeviceClock | None = None,
    ) -> None:
        self._mailroom = mailroom
        self._device = device
        self._joins = joins
        self._sides: dict[int, Any] = {}
        self._pending: dict[int, deque[_Pending]] = {}
        self._joined: set[int] = set()
        self._awaited: list[int] = []
        self._clock = clock
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
            with timed_transfer(self._clock, transfer):
                self._mailroom.push(source, buffer, self._mailroom.flag(transfer))
            event = side.record_event()
        num_bytes = num_span_bytes(buffer)
        self._pending[dst].append(_Pending(transfer, (value, source), num_bytes, event))
        self._held_bytes += num_bytes
        while self._held_bytes > MOST_HELD_BYTES:
            self._join_first(max(self._pending, key=lambda k: len(self._pending[k])))

    def receive(self, transfer: int) -> Any:
        """The buffer of a tensor; it is there once `flush` was called."""
        for send in self._joins[transfer]:
            dst = self._mailroom.schedule.transfers[send].dst
            while send not in self._joined:
                self._join_first(dst)
        buffer = self._mailroom.buffers[transfer]
        if buffer.numel():
            self._awaited.append(transfer)
        return buffer

    def flush(self) -> bool:
        """Wait, in the stream of the ops, for everything received since; tells if it waits.

        One kernel for several tensors waits for them all. It begins after the sends to be joined
        by any of them, so what `joined_before` says of single waits holds for it as well.
        """
        if not self._awaited:
            return False
        flags = self._mailroom.flags[self._device.index]
        for run in _neighbours(self._awaited, flags):
            wait(flags, run, self._mailroom.limit_ns)
        self._awaited = []
        return True

    def join(self, transfer: int) -> None:
        """Let the ops' stream wait for a push made before. It waits for nobody, so no harm."""
        dst = self._mailroom.schedule.transfers[transfer].dst
        while transfer not in self._joined:
            self._join_first(dst)

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
        dense = pack_tensor(value)
        if same_layout(dense, buffer):
            return dense
        staged = empty_like_layout(buffer, value.device)
        staged.copy_(value)
        return staged


def _neighbours(transfers: list[int], flags: Flags) -> list[list[int]]:
    """Cut where flags do not lie side by side (an empty tensor between, which needs none)."""
    runs: list[list[int]] = []
    for transfer in transfers:
        if runs and flags.slot(runs[-1][-1]) + 1 == flags.slot(transfer):
            runs[-1].append(transfer)
        else:
            runs.append([transfer])
    return runs
