"""The other processes of a step, as the executor of one GPU deals with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from devplace.errors import InputError, RankError
from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.nccl_channels import NcclChannels
from devplace.run.cuda.shared_channels import SharedChannels
from devplace.run.cuda.shared_memory import can_share
from devplace.run.ranks.processes import Processes


class GpuRanks:
    """The processes of a step with a GPU each: their channels, and waiting for them.

    On one host they store into each other's memory where that is possible, else NCCL carries all.

    Args:
        processes: All of them.
        devices: What this one drives.

    Attributes:
        transport: `shared memory` or `nccl`.
        is_over: Whether the group has ended, in one way or the other.

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
        self._nccl: Any = None
        self._shared: SharedChannels | None = None
        self._last: tuple[Any, ...] = ()
        self.is_over = False
        self.transport = "shared memory"
        if not can_share(processes.group, self._device):
            self.transport = "nccl"
            where = self._device.torch_device
            self._nccl = dist.new_group(backend="nccl", device_id=where)

    def channels(self, layouts: Mapping[int, Any]) -> NcclChannels | SharedChannels:
        """Receive buffers, and what carries tensors into them."""
        if self._nccl is not None:
            return NcclChannels(
                self._processes.schedule, self._device, layouts, self._processes, self._nccl
            )
        self._shared = SharedChannels(self._processes, self._device, layouts)
        return self._shared

    def follow(self) -> None:
        """Wait for the step before the one begun last, so that the GPU is never without work."""
        before, self._last = self._last, self._events()
        self._wait(before)

    def wait(self) -> None:
        """Wait for all that was started here, and watch the other processes meanwhile.

        Raises:
            RankError: Another process failed, or does not go on.
        """
        self._wait(self._events())

    def _events(self) -> tuple[Any, ...]:
        users = torch.cuda.current_stream(self._device.torch_device)
        return users.record_event(), self._device.main.record_event()

    def _wait(self, events: Sequence[Any]) -> None:
        try:
            self._processes.group.poll(lambda: all(event.query() for event in events))
        except RankError:
            self.is_over = True
            if self._shared is not None:
                self._shared.abort()
            if self._nccl is not None:
                dist.distributed_c10d._abort_process_group(self._nccl)
            raise

    def close(self) -> None:
        """End the process group; the others do the same."""
        if not self.is_over:
            self.is_over = True
            if self._nccl is not None:
                dist.destroy_process_group(self._nccl)
