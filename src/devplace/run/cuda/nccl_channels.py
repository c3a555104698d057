"""Transfers between processes inside CUDA graphs: NCCL's sends and receives, one after another.

Both are meetings: a kernel may spin until the other process has come. All those of a GPU are
recorded on one stream in the order that all processes share (`meeting_order`), and what an op waits
for was recorded before it. So of all meetings not over the first in that order always goes on:
either GPU has done what it has before, and nothing that comes later stands in its way, whether or
not branches of a graph run at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from devplace.run.cuda.device import CudaDevice, Flags
from devplace.run.cuda.peer_channels import SIDE_PRIORITY, FlagCarrier, receive_buffers
from devplace.run.cuda.push import words_of
from devplace.run.cuda.timestamps import Clock
from devplace.run.ranks.processes import Processes
from devplace.run.ranks.turns import Turns
from devplace.schedule import Schedule


class NcclChannels:
    """Receive buffers of one GPU's transfers, all of which come from other processes.

    Args:
        schedule: What every device does, in all processes.
        device: The GPU of this one.
        layouts: Transfer -> a tensor (on any device) laid out as what crosses.
        processes: All of them.
        group: Their NCCL process group.

    Attributes:
        flags: Of the GPU; no transfer raises any.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: CudaDevice,
        layouts: Mapping[int, Any],
        processes: Processes,
        group: Any,
    ) -> None:
        self.schedule = schedule
        self.processes = processes
        self._layouts = layouts
        self._group = group
        arriving = [t for kind, _, t in schedule.instructions[device.index] if kind == "receive"]
        with device.current():
            self.flags = {device.index: Flags([], device.torch_device)}
            kinds = {transfer: layouts[transfer] for transfer in arriving}
            self.buffers = receive_buffers(kinds, device.torch_device)
        self.order = tuple(t for t in processes.order if layouts[t].numel())
        self.unawaited: frozenset[int] = frozenset()
        self._device = device

    def carrier(
        self, device: CudaDevice, joins: Mapping[int, tuple[int, ...]], clock: Clock | None
    ) -> NcclCarrier:
        """What carries tensors while the graph of the GPU is captured."""
        return NcclCarrier(self, device, joins, clock)

    def lane(self, _: int) -> int:
        """Everything has one stream."""
        return 0

    def target(self, transfer: int) -> Any:
        """A tensor laid out as what crosses."""
        return self._layouts[transfer]

    def carry(self, source: Any, transfer: int) -> int:
        """Send a tensor, on the current stream."""
        dist.send(words_of(source), self.processes.ends(transfer)[1], group=self._group)
        return 0

    def receive(self, transfer: int) -> None:
        """Receive a tensor into its buffer, on the current stream."""
        sender, _ = self.processes.ends(transfer)
        dist.recv(words_of(self.buffers[transfer]), sender, group=self._group)

    def spread(self, value: Any, owner: int) -> None:
        """Send a result from its owner to all others, on the current stream."""
        me = self.processes.group.rank
        for rank in range(self.processes.group.size):
            if value.numel() and rank != owner and me == owner:
                dist.send(words_of(value), rank, group=self._group)
            elif value.numel() and rank != owner and me == rank:
                dist.recv(words_of(value), owner, group=self._group)

    def reset(self) -> None:
        """There is nothing to reset: after a failure the processes end."""

    def rehearse(self) -> None:
        """Carry everything once, so that NCCL connects and loads its kernels before a capture."""
        device = self._device
        with device.current():
            for transfer in self.order:
                if transfer in self.buffers:
                    self.receive(transfer)
                else:
                    like = self._layouts[transfer]
                    source = torch.empty_strided(
                        like.shape, like.stride(), dtype=like.dtype, device=device.torch_device
                    )
                    words_of(source).zero_()
                    self.carry(source, transfer)
        device.synchronize()


class NcclCarrier(FlagCarrier):
    """Sends and receives of one GPU while its graph is captured; see `FlagCarrier`."""

    def __init__(
        self,
        channels: NcclChannels,
        device: CudaDevice,
        joins: Mapping[int, tuple[int, ...]],
        clock: Clock | None = None,
    ) -> None:
        super().__init__(channels, device, joins, clock)
        self._channels = channels
        self._turns = Turns(channels.order, self._receive)
        self._came: dict[int, Any] = {}
        self._side = torch.cuda.Stream(device.torch_device, priority=SIDE_PRIORITY)
        self._side.wait_stream(device.main)
        self._sides[0], self._pending[0] = self._side, deque()

    def send(self, transfer: int, value: Any) -> None:
        """Send a tensor, after what comes before it in the order of all processes."""
        if self._channels.target(transfer).numel():
            self._turns.before_send(transfer)
        super().send(transfer, value)

    def flush(self) -> bool:
        """Let the stream of the ops wait for everything received since; tells if it waits."""
        for transfer in self._awaited:
            self._turns.until_received(transfer)
            self._device.main.wait_event(self._came[transfer])
        waits = bool(self._awaited)
        self._awaited = []
        return waits

    def share_results(self, mine: dict[int, Any]) -> dict[int, Any]:
        """Results of all processes that replace nothing, given this one's, by index.

        They are sent last, in one order; outside of the graph a message of NCCL could run beside
        those of the graph, which it cannot bear.
        """
        processes, found = self._channels.processes, {}
        for index, owner in processes.owners().items():
            if owner == processes.group.rank:
                found[index] = mine[index].contiguous()
            else:
                found[index] = processes.empty_result(index, self._device.torch_device)
            self._side.wait_stream(self._device.main)
            with torch.cuda.stream(self._side):
                self._channels.spread(found[index], owner)
        self._device.main.wait_stream(self._side)
        return found

    def _receive(self, transfer: int) -> None:
        """It waits for nothing but what comes before it in the order."""
        with torch.cuda.stream(self._side):
            self._channels.receive(transfer)
            self._came[transfer] = self._side.record_event()
