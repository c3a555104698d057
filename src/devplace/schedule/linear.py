"""A linear order of all instructions, and the pushes to join before each wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from devplace.device_kinds import is_host
from devplace.errors import PlanError
from devplace.schedule.rough_times import (
    JOINED_BYTES,
    PATIENCE,
    push_lane,
    rough_op_ns,
    rough_transfer_ns,
)
from devplace.schedule.schedule import PlannedTransfer, Schedule

Place = tuple[int, int]


def linear_order(schedule: Schedule) -> list[Place]:
    """Every instruction once, as (device, index), about as they will happen.

    A device's instructions keep their order, and a tensor is received after it was sent; so a
    single thread can run them one after another.

    Raises:
        PlanError: The devices wait for each other.

    Complexity: O(I log D) for I instructions on D devices.
    """
    return [place for place, _ in timed_order(schedule)]


def meeting_order(schedule: Schedule, rank_of: Sequence[int]) -> tuple[int, ...]:
    """Transfers between processes, in the one order in which every process carries out its own.

    A message between processes is a meeting: the sender may have to wait until the receiver takes
    it, as well as the other way round. If every process carries out its sends and receives one
    after another in this order, none waits for ever: of all messages not over, take the first. Each
    of its two processes has done all it has before, so it waits for none; the receiver takes the
    message at once. The sender's device has to get to the send, and what it waits for until then
    comes before the send in `linear_order`, so those messages are over. So it is sent.

    Args:
        schedule: What every device does, in all processes.
        rank_of: Process that drives each device. Shape `[D]`.
    """
    sends = (schedule.instructions[device][index] for device, index in linear_order(schedule))
    return tuple(
        transfer
        for kind, _, transfer in sends
        if kind == "send" and crosses(schedule.transfers[transfer], rank_of)
    )


def crosses(transfer: PlannedTransfer, rank_of: Sequence[int]) -> bool:
    """Whether a tensor goes from one process to another."""
    return rank_of[transfer.src] != rank_of[transfer.dst]


def timed_order(schedule: Schedule) -> list[tuple[Place, int]]:
    """`linear_order` with the estimated start of every instruction, ns since the step began.

    Of all devices whose next instruction need not wait for a sender, the one that begins it first
    goes on; of those that begin at once, the first device.
    """
    clock, done = [0] * len(schedule.instructions), [0] * len(schedule.instructions)
    arrival: dict[int, int] = {}
    waiting: dict[int, int] = {}  # transfer -> device
    ready: list[tuple[int, int]] = []  # a heap of (start, device)
    order: list[tuple[Place, int]] = []
    ops, on_cpu = schedule.graph.ops, [is_host(name) for name in schedule.device_names]

    def go_on(device: int) -> None:
        if done[device] == len(schedule.instructions[device]):
            return
        kind, _, transfer = schedule.instructions[device][done[device]]
        if kind == "receive" and transfer not in arrival:
            waiting[transfer] = device
        else:
            heappush(ready, (max(clock[device], arrival.get(transfer, 0)), device))

    for device in range(len(schedule.instructions)):
        go_on(device)
    while ready:
        start, device = heappop(ready)
        instruction = schedule.instructions[device][done[device]]
        order.append(((device, done[device]), start))
        done[device] += 1
        clock[device] = start + (
            rough_op_ns(ops[instruction.what], on_cpu[device]) if instruction.kind == "call" else 0
        )
        go_on(device)
        if instruction.kind == "send":
            num_bytes = schedule.transfers[instruction.transfer].num_bytes
            arrival[instruction.transfer] = start + rough_transfer_ns(num_bytes)
            if instruction.transfer in waiting:
                go_on(waiting.pop(instruction.transfer))
    if len(order) < sum(map(len, schedule.instructions)):
        raise PlanError("The devices wait for each other's tensors. Make the plan again.")
    return order


class PushJoins(NamedTuple):
    """Where each device waits for its pushes to be over.

    Attributes:
        before_wait: Of `joined_before`.
        when_over: Of `freed_before`.
    """

    before_wait: Mapping[int, tuple[int, ...]]
    when_over: Sequence[Mapping[int, tuple[int, ...]]]

    @classmethod
    def of(cls, schedule: Schedule) -> PushJoins:
        """Those of a schedule, all devices of it together."""
        timed = timed_order(schedule)
        before_wait = joined_before(schedule, [place for place, _ in timed])
        return cls(before_wait, freed_before(schedule, dict(timed)))


def freed_before(
    schedule: Schedule, starts: Mapping[Place, int]
) -> tuple[dict[int, tuple[int, ...]], ...]:
    """Large pushes that should be over when an instruction begins, so that joining them is free.

    A tensor that is pushed keeps its memory until the sender's ops are known to come after the
    push. A join waits for a push and for nobody else, so what `joined_before` proves still holds.

    Args:
        schedule: What every device does.
        starts: Of `timed_order`.

    Returns:
        Per device: instruction -> sends to join before it, in the order they were sent.
    """
    found: list[dict[int, tuple[int, ...]]] = []
    for device, instructions in enumerate(schedule.instructions):
        free: dict[int, int] = {}
        flying: list[tuple[int, int]] = []
        joins: dict[int, tuple[int, ...]] = {}
        for index, (kind, _, transfer) in enumerate(instructions):
            now = starts[device, index]
            if kind == "call" and any(due <= now for due, _ in flying):
                joins[index] = tuple(send for due, send in flying if due <= now)
                flying = [(due, send) for due, send in flying if due > now]
            if kind == "send" and schedule.transfers[transfer].num_bytes >= JOINED_BYTES:
                record = schedule.transfers[transfer]
                took = rough_transfer_ns(record.num_bytes)
                begin = max(now, free.get(lane_of(record), 0))
                free[lane_of(record)] = begin + took
                flying.append((begin + PATIENCE * took, transfer))
        found.append(joins)
    return tuple(found)


def lane_of(transfer: PlannedTransfer) -> int:
    """Which of its sender's streams carries it; what one stream carries arrives in turn."""
    return push_lane(transfer.num_bytes, transfer.dst)


def joined_before(
    schedule: Schedule, order: list[Place], lane: Callable[[PlannedTransfer], int] = lane_of
) -> dict[int, tuple[int, ...]]:
    """For every transfer, the sends of its receiver that must be over before it is waited for.

    A GPU pushes tensors on streams beside its ops and spins where it waits for one. Nothing
    promises that a push runs while a wait of the same device spins, so a push that another device
    needs to get on must be over before. Those are the earlier sends whose receives come first in
    `order`. They suffice: of all waits that spin, take the first in `order`. Its push stands on a
    device that spins at a later wait (in `order`). If the push came after that wait, the wait
    would come first in `order` too; as it came before, the wait began only after it was over. So
    the first wait ends, and by induction all do. A CPU device sends before it goes on, so there
    every earlier send is over.

    Args:
        schedule: What every device does.
        order: Of `linear_order`.
        lane: Stream of the sender that carries a transfer.

    Returns:
        PlannedTransfer -> sends to join, the last one per lane; earlier ones on it are over too.
    """
    position = {
        schedule.instructions[device][index].transfer: place
        for place, (device, index) in enumerate(order)
        if schedule.instructions[device][index].kind == "receive"
    }
    joins: dict[int, tuple[int, ...]] = {}
    for instructions in schedule.instructions:
        lanes: dict[int, _Lane] = {}
        for kind, _, transfer in instructions:
            if kind == "send":
                own = lanes.setdefault(lane(schedule.transfers[transfer]), _Lane())
                own.push(position[transfer], transfer)
            elif kind == "receive":
                now = position[transfer]
                due = [lane_.due(now) for lane_ in lanes.values()]
                joins[transfer] = tuple(send for send in due if send is not None)
    return joins


class _Lane:
    """What one stream of a device has sent and not joined, by when it is waited for."""

    def __init__(self) -> None:
        self._sent: list[int] = []
        self._num_joined = 0
        self._waits: list[tuple[int, int]] = []  # a heap of (position of the wait, place in sent)

    def push(self, position: int, transfer: int) -> None:
        """A send."""
        heappush(self._waits, (position, len(self._sent)))
        self._sent.append(transfer)

    def due(self, now: int) -> int | None:
        """The last send that is waited for before this position; with it all before it are over."""
        last = -1
        while self._waits and self._waits[0][0] < now:
            last = max(last, heappop(self._waits)[1])
        if last < self._num_joined:
            return None
        self._num_joined = last + 1
        return self._sent[last]


def come_with_others(
    schedule: Schedule,
    is_pushed: Callable[[int], bool],
    lane: Callable[[PlannedTransfer], int] = lane_of,
) -> frozenset[int]:
    """Transfers that have come once what their receiver waited for before has; none needs a wait.

    What one lane carries arrives in turn, so a tensor is there when one that follows it in its lane
    is. Tensors made early and read late, as activations that only gradients need, mostly are.

    Args:
        schedule: What every device does.
        is_pushed: Whether a transfer goes straight from GPU to GPU.
        lane: Stream of the sender that carries a transfer.
    """
    turn: dict[int, int] = {}
    for instructions in schedule.instructions:
        sent = [transfer for kind, _, transfer in instructions if kind == "send"]
        turn.update((transfer, k) for k, transfer in enumerate(sent))
    found: set[int] = set()
    for instructions in schedule.instructions:
        seen: dict[tuple[int, int], int] = {}
        for kind, _, transfer in instructions:
            if kind != "receive" or not is_pushed(transfer):
                continue
            record = schedule.transfers[transfer]
            way = record.src, lane(record)
            if turn[transfer] < seen.get(way, -1):
                found.add(transfer)
            elif record.num_bytes:  # what is empty is never sent
                seen[way] = turn[transfer]
    return frozenset(found)
