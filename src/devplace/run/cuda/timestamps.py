"""Measure when ops and transfers ran on a GPU, by timestamps between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from devplace.run.cuda.device import CudaDevice
from devplace.run.measured_timeline import MeasuredTimeline, make_timeline
from devplace.schedule import Schedule

CALIBRATIONS = 20


class Clock(Protocol):
    """Notes when something happened on a device."""

    def stamp(self, kind: str, what: int = -1) -> None:
        """Note the time: `begin`, `op`, `wait`, `send` or `sent`."""
        ...

    def records(self) -> list[tuple[str, int, int]]:
        """(kind, what, ns) in the order they were asked for; the step must have ended."""
        ...


class DeviceClock:
    """Stamps of one device, taken by a kernel between ops: each makes the step 1-2 us longer.

    Args:
        most: How many stamps there may be.
        torch_device: The device.
    """

    def __init__(self, most: int, torch_device: Any) -> None:
        self._stamps = torch.zeros(most, dtype=torch.int64, device=torch_device)
        self._what: list[tuple[str, int]] = []

    def stamp(self, kind: str, what: int = -1) -> None:
        """Note the time on the current stream: `begin`, `op`, `wait`, `send` or `sent`."""
        from devplace.run.cuda import kernels

        kernels.stamp_kernel[(1,)](self._stamps, len(self._what), num_warps=1)
        self._what.append((kind, what))

    def records(self) -> list[tuple[str, int, int]]:
        """(kind, what, ns) in the order they were asked for; the step must have ended."""
        times = self._stamps[: len(self._what)].tolist()
        return [(*what, when) for what, when in zip(self._what, times, strict=True)]


Clocks = Mapping[int, Clock]


def make_clocks(schedule: Schedule, devices: Mapping[int, CudaDevice]) -> dict[int, DeviceClock]:
    """A clock per device, with room for all its instructions."""
    clocks = {}
    for index, device in devices.items():
        with device.current():
            most = 2 * len(schedule.instructions[index]) + 2
            clocks[index] = DeviceClock(most, device.torch_device)
    return clocks


@contextmanager
def timed_transfer(clock: Clock | None, transfer: int) -> Iterator[None]:
    """Stamps around a transfer, if there is a clock."""
    if clock is not None:
        clock.stamp("send", transfer)
    yield
    if clock is not None:
        clock.stamp("sent", transfer)


def offset_ns(device: CudaDevice) -> int:
    """What to add to a device's stamps to have the host's `perf_counter_ns`, to some 10 us."""
    best = None
    for _ in range(CALIBRATIONS):
        with device.current():
            clock = DeviceClock(1, device.torch_device)
            device.synchronize()
            before = time.perf_counter_ns()
            clock.stamp("begin")
            device.synchronize()
            after = time.perf_counter_ns()
            ((_, _, stamp),) = clock.records()
        found = (after - before, (before + after) // 2 - stamp)
        best = found if best is None else min(best, found)
    assert best is not None
    return best[1]


def collect(schedule: Schedule, clocks: Clocks, offsets_ns: Mapping[int, int]) -> MeasuredTimeline:
    """Timeline of a step from the stamps of all devices.

    An op begins at the stamp before its own in the stream of the ops. A transfer through host
    memory ends with the last of its stamps, the receiver's.

    Args:
        schedule: What every device did.
        clocks: Device -> its stamps.
        offsets_ns: Device -> what to add to them; a CPU device needs nothing.
    """
    ops: list[tuple[int, int, int]] = []
    sent: dict[int, list[int]] = {}
    begins, ends = [], []
    for index, clock in clocks.items():
        last = 0
        for kind, what, when in clock.records():
            now = when + offsets_ns.get(index, 0)
            if kind in ("send", "sent"):
                sent.setdefault(what, []).append(now)
            else:
                if kind == "op":
                    ops.append((what, last, now))
                last = now
                begins.append(now)
            ends.append(now)
    num_ops, begin = len(schedule.graph.ops), min(begins, default=0)
    stamps = [sent.get(transfer, [begin]) for transfer in range(len(schedule.transfers))]
    transfers = [(min(times), max(times)) for times in stamps]
    return make_timeline(num_ops, ops, transfers, begin, max(ends, default=0))
