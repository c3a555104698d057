"""Transfers between processes of one host: each GPU stores into memory that another one shares.

Kernels, flags and joins are those of `peer_channels`, so what `joined_before` proves holds. What
one process does between its graphs is done inside them: a graph begins by waiting until every other
GPU has read what it was sent in the step before, and ends by pushing results to the processes that
did not make them and by telling that it is through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.peer_channels import FlagCarrier, PeerChannels
from devplace.run.cuda.push import copy_by_engine, push
from devplace.run.cuda.routes import Route
from devplace.run.cuda.shared_memory import offer_tensors, open_tensors
from devplace.run.cuda.timestamps import Clock
from devplace.run.ranks.processes import Processes

# A process may be late as it loads data; whether it still runs is watched outside of the step.
LIMIT_S = 1e9


class _Far(NamedTuple):
    """What another process's GPU shares: counters and buffers by key."""

    counters: dict[int, Any]
    buffers: dict[int, Any]


class SharedChannels(PeerChannels):
    """Receive buffers and flags of one GPU, and those of the GPUs that it sends to.

    Keys of flags and buffers: transfers, then results, then processes that are through with a step.

    Args:
        processes: All of them, each with one GPU.
        device: That of this one.
        layouts: Transfer -> a tensor (on any device) laid out as what crosses.
    """

    def __init__(
        self, processes: Processes, device: CudaDevice, layouts: Mapping[int, Any]
    ) -> None:
        schedule, self._processes, self._device = processes.schedule, processes, device
        self._rank = processes.group.rank
        self._others = [rank for rank in range(processes.group.size) if rank != self._rank]
        num_transfers = len(schedule.transfers)
        self.owner_of = {num_transfers + k: owner for k, owner in processes.owners().items()}
        self._first_end = num_transfers + len(schedule.graph.results)
        self._layouts = layouts
        ends = [self._first_end + rank for rank in self._others]
        received = [key for key, owner in self.owner_of.items() if owner != self._rank]
        peer: Route = "peer"
        super().__init__(
            *(schedule, {device.index: device}, layouts, push, LIMIT_S),
            routes=(peer,) * (self._first_end + processes.group.size),
            more_flags=[*received, *ends],
        )
        for key in received:
            self.buffers[key] = self._result_like(key)
        self._stop = torch.ones(1, dtype=torch.int32).pin_memory()
        self._stop_stream = torch.cuda.Stream(device.torch_device)
        self._far = self._meet()

    def carrier(
        self, device: CudaDevice, joins: Mapping[int, tuple[int, ...]], clock: Clock | None
    ) -> SharedCarrier:
        """What carries tensors while the graph of the GPU is captured."""
        return SharedCarrier(self, device, joins, clock)

    def target(self, transfer: int) -> Any:
        """Where the sender of a transfer puts it."""
        sender, receiver = self._processes.ends(transfer)
        if sender != self._rank or not self._layouts[transfer].numel():
            return self._layouts[transfer]
        return self._far[receiver].buffers[transfer]

    def flag(self, transfer: int) -> Any:
        """Flag of a transfer that this GPU sends."""
        return self._far[self._processes.ends(transfer)[1]].counters[transfer]

    def await_others(self) -> None:
        """Wait on the current stream until all other GPUs are through with the last step."""
        self.await_on(self._device.index, [self._first_end + rank for rank in self._others])

    def tell_others(self) -> None:
        """Tell all other GPUs, on the current stream, that this one is through with the step."""
        for rank in self._others:
            counter = self._far[rank].counters[self._first_end + self._rank]
            copy_by_engine(self._epoch, counter, self._device.torch_device)

    def send_result(self, key: int, value: Any) -> int:
        """Push a result to all other processes, on the current stream.

        Returns:
            How much its flag grows by, the same everywhere.
        """
        blocks = 0
        for rank in self._others:
            far = self._far[rank]
            if value.numel():
                blocks = self.push(value, far.buffers[key], far.counters[key], self._epoch)
        return blocks

    def receive_result(self, key: int) -> Any:
        """A copy of a result of another process, which is waited for on the current stream."""
        if self.buffers[key].numel():
            self.await_on(self._device.index, [key])
        return self.buffers[key].clone()

    def abort(self) -> None:
        """Let every wait of this GPU end at once; what its step makes from then on is worthless."""
        with torch.cuda.stream(self._stop_stream):
            self.flags[self._device.index].error.copy_(self._stop, non_blocking=True)

    @property
    def _epoch(self) -> Any:
        return self.flags[self._device.index].epoch

    def _result_like(self, key: int) -> Any:
        index = key - len(self.schedule.transfers)
        return self._processes.empty_result(index, self._device.torch_device)

    def _meet(self) -> dict[int, _Far]:
        """Offer this GPU's memory to all others, and open what they offer to this one."""
        flags, where = self.flags[self._device.index], self._device.torch_device
        torch.cuda.synchronize(where)
        counters = {key: flags.counter(key) for key in flags.slots}
        buffers = {key: buffer for key, buffer in self.buffers.items() if buffer.numel()}
        offer = {"counters": offer_tensors(counters), "buffers": offer_tensors(buffers)}
        offers = self._processes.group.exchange("memory", offer, "the capture")
        return {
            rank: _Far(
                open_tensors(offers[rank]["counters"], where, self._raises),
                open_tensors(offers[rank]["buffers"], where, self._raises),
            )
            for rank in self._others
        }

    def _raises(self, key: int) -> bool:
        """Whether this GPU sends what has this key, so that it raises its flag."""
        if key < len(self.schedule.transfers):
            return self._processes.ends(key)[0] == self._rank
        if key < self._first_end:
            return self.owner_of[key] == self._rank
        return key == self._first_end + self._rank

    def _push_all(self) -> dict[int, int]:
        blocks = super()._push_all()
        with self._device.current():
            for key, owner in self.owner_of.items():
                if owner == self._rank:
                    blocks[key] = self.send_result(key, self._result_like(key).zero_())
            self.tell_others()
        return blocks

    def _of_everyone(self, blocks: dict[int, int]) -> dict[int, int]:
        told = self._processes.group.exchange("blocks", list(blocks.items()), "the capture")
        ends = {self._first_end + rank: 1 for rank in self._others}
        return ends | {key: count for each in told for key, count in each}


class SharedCarrier(FlagCarrier):
    """Sends and receives of one GPU while its graph is captured; see `FlagCarrier`."""

    def __init__(
        self,
        channels: SharedChannels,
        device: CudaDevice,
        joins: Mapping[int, tuple[int, ...]],
        clock: Clock | None = None,
    ) -> None:
        super().__init__(channels, device, joins, clock)
        self._channels = channels

    def begin(self) -> None:
        """Wait until nobody reads any more what was sent in the step before."""
        self._channels.await_others()

    def share_results(self, mine: dict[int, Any]) -> dict[int, Any]:
        """Results of all processes that replace nothing, given this one's, by index.

        All of this GPU's pushes are over by now, and a result waits for no other one; so no GPU
        waits for ever.
        """
        first = len(self._channels.schedule.transfers)
        found = dict(mine)
        for index, value in mine.items():
            self._channels.send_result(first + index, value.contiguous())
        for key in self._channels.owner_of:
            if key - first not in mine:
                found[key - first] = self._channels.receive_result(key)
        self._channels.tell_others()
        return found
