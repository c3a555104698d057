"""Transfers between processes inside CUDA graphs: NCCL's sends and receives, one after another.

Both are meetings: a kernel may spin until the other process has come. All those of a GPU are
recorded on one stream in the order that all processes share (`meeting_order`), and what an op waits
for was recorded before it. So of all meetings not over the first in that order always goes on:
either GPU has done what it has before, and nothing that comes later stands in its way, whether or
not branches of a graph run at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from devplace.errors import InputError, RankError
from devplace.run.cuda.device import CudaDevice, Flags
from devplace.run.cuda.peer_channels import SIDE_PRIORITY, FlagCarrier, receive_buffers
from devplace.run.cuda.push import words_of
from devplace.run.cuda.timestamps import Clock
from devplace.run.ranks.processes import Processes
from devplace.run.ranks.turns import Turns
from devplace.schedule import Schedule


class RankChannels:
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
        self._rehearse(device)

    def carrier(
        self, device: CudaDevice, joins: Mapping[int, tuple[int, ...]], clock: Clock | None
    ) -> RankCarrier:
        """What carries tensors while the graph of the GPU is captured."""
        return RankCarrier(self, device, joins, clock)

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

    def reset(self) -> None:
        """There is nothing to reset: after a failure the processes end."""

    def _rehearse(self, device: CudaDevice) -> None:
        """Carry everything once, so that NCCL connects and loads its kernels before a capture."""
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


class RankCarrier(FlagCarrier):
    """Sends and receives of one GPU while its graph is captured; see `FlagCarrier`."""

    def __init__(
        self,
        channels: RankChannels,
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

    def _receive(self, transfer: int) -> None:
        """It waits for nothing but what comes before it in the order."""
        with torch.cuda.stream(self._side):
            self._channels.receive(transfer)
            self._came[transfer] = self._side.record_event()


class NcclRanks:
    """The NCCL process group of a step: its channels, its results, and waiting for it.

    Args:
        processes: All of them.
        devices: What this one drives.

    Raises:
        InputError: That is not one GPU.
    """

    def __init__(self, processes: Processes, devices: Sequence[Any]) -> None:
        if len(devices) != 1 or not isinstance(devices[0], CudaDevice):
            raise InputError(
                f"Of several processes with GPUs each drives one GPU and no CPU: "
                f"{processes.group.name(processes.group.rank)} has {len(devices)} devices with "
                f"ops. Start a process for each GPU of the plan, and plan without CPUs."
            )
        self._processes = processes
        self._device: CudaDevice = devices[0]
        self._nccl = dist.new_group(backend="nccl", device_id=self._device.torch_device)
        self.is_over = False

    def channels(self, layouts: Mapping[int, Any]) -> RankChannels:
        """Receive buffers, and what carries tensors into them."""
        return RankChannels(
            self._processes.schedule, self._device, layouts, self._processes, self._nccl
        )

    def share_results(self, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Results of all processes on this one's GPU, on the caller's stream; not waited for."""
        graph, found = self._processes.schedule.graph, {}
        with torch.cuda.device(self._device.torch_device):
            for index, owner in self._processes.owners().items():
                record = graph.tensors[graph.results[index].tensor]
                value = mine.get(index)
                if value is None:
                    dtype = getattr(torch, record.dtype)
                    value = torch.empty(record.shape, dtype=dtype, device=self._device.torch_device)
                found[index] = value.contiguous()
                dist.broadcast(found[index], owner, group=self._nccl)
        return found

    def wait(self) -> None:
        """Wait for all that was started here, and watch the other processes meanwhile.

        Raises:
            RankError: Another process failed, or does not go on.
        """
        end = torch.cuda.current_stream(self._device.torch_device).record_event()
        events = (end, self._device.main.record_event())
        group = self._processes.group
        try:
            group.poll(lambda: all(event.query() for event in events))
        except RankError:
            self.is_over = True
            dist.distributed_c10d._abort_process_group(self._nccl)
            raise

    def close(self) -> None:
        """End the process group; the others do the same."""
        if not self.is_over:
            self.is_over = True
            dist.destroy_process_group(self._nccl)
