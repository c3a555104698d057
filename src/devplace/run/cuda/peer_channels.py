"""Transfers inside CUDA graphs: pushes beside the ops, waits among them.

Tensors that go through host memory (`routes.py`) take the same places: the sender's copy and flag
stand where a push would, and the receiver's copy follows the wait. So what `joined_before` proves
of pushes holds for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from devplace.run.cuda.device import CudaDevice, Flags, empty_like_layout
from devplace.run.cuda.host_push import fetch_from_host, send_to_host, wait_for_host
from devplace.run.cuda.packing import Packing, num_span_bytes
from devplace.run.cuda.pinned import PinnedBoard, plain_bytes
from devplace.run.cuda.push import Push, same_layout, wait, words_of
from devplace.run.cuda.routes import Route, neighbours
from devplace.run.cuda.timestamps import Clock, timed_transfer
from devplace.schedule import Schedule
from devplace.schedule.linear import come_with_others, lane_of
from devplace.schedule.rough_times import JOINED_BYTES

if TYPE_CHECKING:
    from devplace.run.cuda.nccl_channels import NcclChannels

# Small tensors being pushed keep their memory until the ops are known to come after the push.
MAX_HELD_BYTES = 512 * 2**20
# Pushes get multiprocessors before the ops do: an op with many blocks would keep them waiting.
SIDE_PRIORITY = -1


class _Pending(NamedTuple):
    transfer: int
    held: Any
    num_bytes: int
    event: Any


class PeerChannels:
    """Receive buffers and flags of all transfers of a schedule.

    Args:
        schedule: What every device does.
        devices: The GPUs that do something, by index.
        layouts: Transfer -> a tensor (on any device) laid out as what crosses.
        push: Carries one tensor (another one for tests of faulty links).
        wait_limit_s: How long a tensor may be waited for, s.
        routes: Way of every transfer.
        more_flags: Keys of further flags of each GPU, behind those of its transfers.

    Attributes:
        board: Buffers and flags in host memory.
        unawaited: Of `come_with_others`.
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Mapping[int, CudaDevice],
        layouts: Mapping[int, Any],
        push: Push,
        wait_limit_s: float,
        routes: Sequence[Route],
        more_flags: Sequence[int] = (),
    ) -> None:
        self.schedule = schedule
        self._devices = devices
        self.limit_ns = round(wait_limit_s * 1e9)
        self.push = push
        self.buffers: dict[int, Any] = {}
        self.flags: dict[int, Flags] = {}
        self.routes = routes
        self.board = self._make_board(devices, layouts)
        self.unawaited = come_with_others(schedule, lambda t: routes[t] == "peer")
        for index, device in devices.items():
            arriving = [t for kind, _, t in schedule.instructions[index] if kind == "receive"]
            # The flags of those that one kernel waits for lie side by side.
            flagged = sorted(arriving, key=self.unawaited.__contains__)
            with device.current():
                self.flags[index] = Flags([*flagged, *more_flags], device.torch_device)
                kinds = {transfer: layouts[transfer] for transfer in arriving}
                self.buffers |= receive_buffers(kinds, device.torch_device)
            device.synchronize()

    def rehearse(self) -> None:
        """Push everything once: compiles and loads the kernels, and counts their blocks."""
        blocks = self._push_all()
        for device in self._devices.values():
            device.synchronize()
        blocks = self._of_everyone(blocks)
        self.reset()
        for device in self._devices.values():
            torch.cuda.synchronize(device.torch_device)
        for index, device in self._devices.items():
            self._rehearse_receiver(index, device, blocks)

    def reset(self) -> None:
        """Flags as new; nothing may be running."""
        for flags in self.flags.values():
            flags.reset()
        self.board.reset()

    def carrier(
        self, device: CudaDevice, joins: Mapping[int, tuple[int, ...]], clock: Clock | None
    ) -> FlagCarrier:
        """What carries tensors while the graph of a GPU is captured."""
        return FlagCarrier(self, device, joins, clock)

    def lane(self, transfer: int) -> int:
        """Which of its sender's streams carries a transfer."""
        return lane_of(self.schedule.transfers[transfer])

    def target(self, transfer: int) -> Any:
        """Where the sender of a transfer puts it."""
        return self.board.buffers.get(transfer, self.buffers.get(transfer))

    def carry(self, source: Any, transfer: int) -> int:
        """Put a tensor where it goes, on the current stream of its sender, and raise its flag.

        Returns:
            How much its flag on the receiver grows by.
        """
        epoch = self.flags[self.schedule.transfers[transfer].src].epoch
        if self.routes[transfer] == "peer":
            return self.push(source, self.target(transfer), self.flag(transfer), epoch)
        send_to_host(source, self.board, transfer, epoch)
        return 0

    def await_on(self, index: int, transfers: list[int]) -> list[int]:
        """Wait on the current stream of a receiver; gives those to be fetched from host memory."""
        flags = self.flags[index]
        direct = [t for t in transfers if self.routes[t] == "peer"]
        staged = [t for t in transfers if self.routes[t] != "peer"]
        for run in neighbours(direct, flags.slots):
            wait(flags, run, self.limit_ns)
        for run in neighbours(staged, flags.slots, self.board.slots):
            wait_for_host(self.board, flags, run, self.limit_ns)
        return staged

    def fetch(self, transfer: int) -> None:
        """Bring a tensor from host memory into its receiver's buffer, on its current stream."""
        epoch = self.flags[self.schedule.transfers[transfer].dst].epoch
        fetch_from_host(self.board, transfer, self.buffers[transfer], epoch)

    def flag(self, transfer: int) -> Any:
        """Flag of a transfer, on its receiver."""
        return self.flags[self.schedule.transfers[transfer].dst].counter(transfer)

    def _make_board(
        self, devices: Mapping[int, CudaDevice], layouts: Mapping[int, Any]
    ) -> PinnedBoard:
        through_host = {
            transfer: layouts[transfer]
            for instructions in self.schedule.instructions
            for kind, _, transfer in instructions
            if kind == "receive" and self.routes[transfer] in ("staged", "up", "down")
        }
        if not through_host:
            return PinnedBoard({}, plain_bytes)
        with next(iter(devices.values())).current():
            return PinnedBoard(through_host)

    def _push_all(self) -> dict[int, int]:
        """Push zeros in all transfers; gives how much the flag of each grows by."""
        blocks: dict[int, int] = {}
        for transfer, record in enumerate(self.schedule.transfers):
            if record.src in self._devices and self.target(transfer).numel():
                device = self._devices[record.src]
                with device.current():
                    like = empty_like_layout(self.target(transfer), device.torch_device)
                    words_of(like).zero_()
                    blocks[transfer] = self.carry(like, transfer)
        return blocks

    def _of_everyone(self, blocks: dict[int, int]) -> dict[int, int]:
        """With those of the GPUs that other processes drive."""
        return blocks

    def _rehearse_receiver(self, index: int, device: CudaDevice, blocks: dict[int, int]) -> None:
        arriving = [
            t
            for t, record in enumerate(self.schedule.transfers)
            if record.dst == index and self.buffers[t].numel()
        ]
        fetched = [t for t in arriving if self.routes[t] != "peer"]
        with device.current():
            self.flags[index].set_blocks(blocks)
            self.await_on(index, [t for t in arriving if self.routes[t] == "peer"][:1])
            self.await_on(index, fetched[:1])
            for transfer in fetched:
                self.fetch(transfer)
        torch.cuda.synchronize(device.torch_device)


def receive_buffers(layouts: Mapping[int, Any], torch_device: Any) -> dict[int, Any]:
    """Receive buffers of one device by transfer: each has its own place, all step long."""
    pieces = Packing({transfer: num_span_bytes(like) for transfer, like in layouts.items()})
    memory = torch.empty(pieces.num_bytes, dtype=torch.uint8, device=torch_device)
    found = {}
    for transfer, like in layouts.items():
        buffer = pieces.cut(memory, transfer, like)
        found[transfer] = empty_like_layout(like, torch_device) if buffer is None else buffer
    return found


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
        mailroom: PeerChannels | NcclChannels,
        device: CudaDevice,
        joins: Mapping[int, tuple[int, ...]],
        clock: Clock | None = None,
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
        """Push a tensor on a stream beside the ops, that of its lane.

        Recording the push after the next op, so that this one comes first behind the op that made
        the tensor, made steps no faster (NMT-4 on 4 H100: 24.0 ms against 23.4).
        """
        buffer = self._mailroom.target(transfer)
        if buffer.numel() == 0:
            self._joined.add(transfer)
            return
        lane = self._mailroom.lane(transfer)
        if lane not in self._sides:
            self._sides[lane] = torch.cuda.Stream(self._device.torch_device, priority=SIDE_PRIORITY)
            self._pending[lane] = deque()
        side = self._sides[lane]
        side.wait_stream(self._device.main)
        with torch.cuda.stream(side):
            source = value if same_layout(value, buffer) else self._relaid(value, buffer)
            with timed_transfer(self._clock, transfer):
                self._mailroom.carry(source, transfer)
            event = side.record_event()
        size = num_span_bytes(buffer)
        num_bytes = 0 if size >= JOINED_BYTES else size  # large ones are joined when they are over
        self._pending[lane].append(_Pending(transfer, (value, source), num_bytes, event))
        self._held_bytes += num_bytes
        while self._held_bytes > MAX_HELD_BYTES:
            self._join_first(max(self._pending, key=lambda k: len(self._pending[k])))

    def begin(self) -> None:
        """Wait for what must be over before a step begins; one process waits between its graphs."""

    def share_results(self, mine: dict[int, Any]) -> dict[int, Any]:
        """Results of all processes that replace nothing, given this one's, by index."""
        return mine

    def receive(self, transfer: int) -> Any:
        """The buffer of a tensor; it is there once `flush` was called.

        The joins are made also where no wait follows: memory is predicted with them.
        """
        for send in self._joins[transfer]:
            self.join(send)
        buffer = self._mailroom.buffers[transfer]
        if buffer.numel() and transfer not in self._mailroom.unawaited:
            self._awaited.append(transfer)
        return buffer

    def flush(self) -> bool:
        """Wait, in the stream of the ops, for everything received since; tells if it waits.

        One kernel for several tensors waits for them all. It begins after the sends to be joined
        by any of them, so what `joined_before` says of single waits holds for it as well.
        """
        if not self._awaited:
            return False
        mailroom = cast("PeerChannels", self._mailroom)
        for transfer in mailroom.await_on(self._device.index, self._awaited):
            mailroom.fetch(transfer)
            if self._clock is not None:
                self._clock.stamp("sent", transfer)
        self._awaited = []
        return True

    def join(self, transfer: int) -> None:
        """Let the ops' stream wait for a push made before. It waits for nobody, so no harm.

        From then on the ops come after the push, and its tensor's memory can serve them.
        """
        lane = self._mailroom.lane(transfer)
        while transfer not in self._joined:
            self._join_first(lane)

    def finish(self) -> None:
        """Let the ops' stream wait for every push."""
        for lane, pending in self._pending.items():
            while pending:
                self._join_first(lane)

    def _join_first(self, lane: int) -> None:
        first = self._pending[lane].popleft()
        self._device.main.wait_event(first.event)
        self._joined.add(first.transfer)
        self._held_bytes -= first.num_bytes

    def _relaid(self, value: Any, buffer: Any) -> Any:
        # Memory of the ops' stream: that of another one could not serve the ops afterwards.
        with torch.cuda.stream(self._device.main):
            staged = empty_like_layout(buffer, value.device)
        return staged.copy_(value)
