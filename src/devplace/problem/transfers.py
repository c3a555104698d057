"""Every rule of a transfer: how long it takes, what it waits for, what it takes of its ends.

A transfer waits for its link and the link's channels. It occupies the link for its duration and the
channels for bytes / bandwidth, which may be less, and arrives a latency after its end; links and
channels serve in the order of requests. On a link with a copy engine, transfers below the engine's
size have a lane of their own: they wait for each other, but not for channels. On a parallel link
transfers wait for nothing and occupy nothing. Overheads are paid by the ops of sender and receiver.

A step's inputs are no transfers: before anything else begins, each is copied to every device that
reads it, one copy after the other.

In shapes `T` is carriers, `K` read-only sources, `D` devices, `C` kinds of links. The native
simulators take these arrays, and queue by the same rules (`Core::occupy` in
`native/simulator/kernel.hpp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from devplace.machine import Link, Machine
from devplace.machine.machine import channels_of

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
LANE, CHANNELS, NOTHING = 0, 1, 2
"""What a transfer waits for: others in its lane, those and its channels, or nothing."""


class Price(NamedTuple):
    """One carrier on one link; attributes as those of `Transfers`."""

    transfer_ns: int
    channel_ns: int
    queues: int
    send_ns: int
    receive_ns: int
    latency_ns: int

    @property
    def way_ns(self) -> int:
        """Time from a request until the carrier can be read, if it need not wait."""
        return self.transfer_ns + self.latency_ns


@dataclass(frozen=True, eq=False)
class Transfers:
    """Prices of all transfers of a problem.

    Attributes:
        transfer_ns: Time each carrier occupies a link of each kind. `[C, T]`
        channel_ns: Time it occupies the link's channels, which other links may share. `[C, T]`
        queues: `LANE`, `CHANNELS` or `NOTHING`; uint8. `[C, T]`
        send_ns, receive_ns: Time it takes of the sender's and the receiver's ops. `[C, T]`
        link_class: Kind of link of each ordered pair, -1 on the diagonal. `[D, D]`
        latency_ns: `[D, D]`
        channel_ptr, channel: Channels of pair `d * D + e`. `[D*D+1]`, `[..]`
        num_channels: Number of channels.
        copy_ns: Time to copy each read-only source to each device before the step begins; only
            those of the batch take any. `[K, D]`
    """

    transfer_ns: I64
    channel_ns: I64
    queues: NDArray[np.uint8]
    send_ns: I64
    receive_ns: I64
    link_class: I32
    latency_ns: I64
    channel_ptr: I32
    channel: I32
    num_channels: int
    copy_ns: I64

    def price(self, carrier: int, d: int, e: int) -> Price:
        """What a transfer from one device to another takes."""
        transfer, channel, queues, send, receive = self._tables[self._link_class[d][e]]
        return Price(
            transfer[carrier],
            channel[carrier],
            queues[carrier],
            send[carrier],
            receive[carrier],
            self._latency_ns[d][e],
        )

    def channels(self, d: int, e: int) -> list[int]:
        """Channels of the link from one device to another."""
        return self._channels[d * len(self.link_class) + e]

    def way_ns(self, d: int, e: int) -> I64:
        """As `Price.way_ns`, of every carrier. `[T]`"""
        way: I64 = self.transfer_ns[self.link_class[d, e]] + self.latency_ns[d, e]
        return way

    @cached_property
    def dearest_ns(self) -> I64:
        """The most that each carrier takes of a link and its ends, latency apart. `[T]`"""
        dearest: I64 = (self.transfer_ns + self.send_ns + self.receive_ns).max(axis=0)
        return dearest

    @cached_property
    def copied(self) -> list[int]:
        """Read-only sources whose copies take time."""
        return [int(const) for const in np.flatnonzero(self.copy_ns.any(axis=1))]

    # Lists of the arrays: Python reads them faster one by one.

    @cached_property
    def _tables(self) -> list[list[list[int]]]:
        arrays = (self.transfer_ns, self.channel_ns, self.queues, self.send_ns, self.receive_ns)
        return [list(rows) for rows in zip(*[a.tolist() for a in arrays], strict=True)]

    @cached_property
    def _link_class(self) -> list[list[int]]:
        rows: list[list[int]] = self.link_class.tolist()
        return rows

    @cached_property
    def _latency_ns(self) -> list[list[int]]:
        rows: list[list[int]] = self.latency_ns.tolist()
        return rows

    @cached_property
    def _channels(self) -> list[list[int]]:
        ends = zip(self.channel_ptr[:-1].tolist(), self.channel_ptr[1:].tolist(), strict=True)
        flat = self.channel.tolist()
        return [flat[first:last] for first, last in ends]


class TransferQueues:
    """When links and channels are free again, while transfers are requested one by one.

    Args:
        transfers: What each takes.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._channel_free = [0] * transfers.num_channels
        self._lane_free: dict[tuple[int, int, int], int] = {}

    def begins_ns(self, price: Price, d: int, e: int, request_ns: int) -> int:
        """When a transfer of this price would begin if it were requested then."""
        if price.queues == NOTHING:
            return request_ns
        begin = max(request_ns, self._lane_free.get((d, e, price.queues), 0))
        if price.queues == CHANNELS:
            for channel in self._transfers.channels(d, e):
                begin = max(begin, self._channel_free[channel])
        return begin

    def send(self, price: Price, d: int, e: int, request_ns: int) -> int:
        """Let it go; gives when it begins."""
        begin = self.begins_ns(price, d, e, request_ns)
        if price.queues != NOTHING:
            self._lane_free[d, e, price.queues] = begin + price.transfer_ns
            for channel in self._transfers.channels(d, e):
                free = max(self._channel_free[channel], begin)
                self._channel_free[channel] = free + price.channel_ns
        return begin


def price_transfers(
    carrier_bytes: I64,
    const_bytes: I64,
    is_input: NDArray[np.uint8],
    machine: Machine,
    batch_on: str = "",
) -> Transfers:
    """Price all transfers, and the copies of the batch, on a machine.

    Args:
        carrier_bytes: Of each carrier. `[T]`
        const_bytes: Of each read-only source. `[K]`
        is_input: Whether that is of the batch. `[K]`
        machine: Where.
        batch_on: Device on which the batch lies; default: the host.
    """
    names = machine.device_names
    count = len(names)
    link_class = np.full((count, count), -1, np.int32)
    latency = np.zeros((count, count), np.int64)
    kinds: dict[Link, int] = {}
    numbers: dict[str, int] = {}
    rows: list[list[int]] = []
    for d, src in enumerate(names):
        for e, dst in enumerate(names):
            link = machine.path(src, dst) if d != e else None
            rows.append([])
            if link is not None:
                link_class[d, e] = kinds.setdefault(_kind(link), len(kinds))
                latency[d, e] = link.latency_ns
                rows[-1] = [numbers.setdefault(c, len(numbers)) for c in channels_of(link)]
    times = np.zeros((max(1, len(kinds)), len(carrier_bytes)), np.int64)
    send, receive, shared = times.copy(), times.copy(), times.copy()
    queues = np.full(times.shape, CHANNELS, np.uint8)
    for link, row in kinds.items():
        times[row] = transfer_times(carrier_bytes, link)
        at_full_rate = transfer_times(carrier_bytes, msgspec.structs.replace(link, points=()))
        shared[row] = np.minimum(times[row], at_full_rate)
        by_engine = np.where(carrier_bytes >= link.engine_bytes, CHANNELS, LANE)
        queues[row] = NOTHING if link.parallel else by_engine
        send[row] = link.send_overhead_ns + _part(link.send_share, times[row])
        receive[row] = link.receive_overhead_ns + _part(link.receive_share, times[row])
    channel_ptr, channel = pointers(rows)
    copies = copy_times(const_bytes, machine, batch_on)
    copies[is_input == 0] = 0
    return Transfers(
        transfer_ns=times,
        channel_ns=shared,
        queues=queues,
        send_ns=send,
        receive_ns=receive,
        link_class=link_class,
        latency_ns=latency,
        channel_ptr=channel_ptr,
        channel=channel,
        num_channels=len(numbers),
        copy_ns=copies,
    )


def transfer_times(num_bytes: I64, link: Link) -> I64:
    """Time that transfers of these sizes occupy a link, at most the largest int64. ns"""
    sizes, where = np.unique(num_bytes, return_inverse=True)
    most = int(np.iinfo(np.int64).max)
    times = [min(link.duration_ns(int(size)), most) for size in sizes]
    return np.array(times, np.int64)[where] if times else np.zeros(0, np.int64)


def copy_times(num_bytes: I64, machine: Machine, home: str = "") -> I64:
    """Time to copy inputs of a step to each device, ns. `[K, D]`

    A batch lies in host memory, so a copy takes the fastest link from a CPU device, its latency
    included. A CPU device gets a copy as well, as fast as one from another CPU device, but without
    the latency: nobody is woken for it. Where the machine has no such link, and on the device where
    the batch lies, it is taken for free.

    Args:
        num_bytes: Of each input. `[K]`
        machine: Where the step runs.
        home: Name of the device on which the batch lies; default: the host.
    """
    names = machine.device_names
    hosts = [device.name for device in machine.devices if device.traits.is_host]
    homes = [home] if home in names else hosts
    times = np.zeros((len(num_bytes), len(names)), np.int64)
    for column, name in enumerate(names):
        if name == home:
            continue
        is_within_host = name in hosts and homes == hosts
        links = [machine.path(start, name) for start in homes if start != name]
        ways = [
            transfer_times(num_bytes, link) + (0 if is_within_host else link.latency_ns)
            for link in links
            if link
        ]
        if ways:
            times[:, column] = np.min(ways, axis=0)
    return times


def _kind(link: Link) -> Link:
    """What prices a transfer on a link, whoever it joins."""
    return msgspec.structs.replace(link, src="", dst="", channels=(), latency_ns=0, usable=True)


def _part(share: float, times: I64) -> I64:
    """A part of each time, rounded; whole before anything is added, which a float may not hold."""
    rounded: I64 = np.rint(share * times).astype(np.int64)
    return rounded


def pointers(lists: Iterable[Sequence[int]]) -> tuple[I32, I32]:
    """Compressed rows of `lists`: offsets and concatenated values."""
    rows = list(lists)
    ptr = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=ptr[1:])
    flat = np.fromiter((x for row in rows for x in row), np.int32, int(ptr[-1]))
    return ptr, flat
