"""Overheads of transfers on their sender and receiver, inside one CUDA graph."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from devplace.run.cuda.device import Flags
from devplace.run.cuda.probe.port import WAIT_LIMIT_NS, Port, least_gaps, stamped
from devplace.run.cuda.push import Push, wait
from devplace.run.cuda.timestamps import DeviceClock
from devplace.run.probe.report import DeviceReport

OPS = 96
EVERY = 4
"""A transfer after every so many ops, so that pushes on the side stream do not pile up."""
SMALL_WORDS = 256
REPLAYS = 5


def measure_overheads(port: Port, peer: Port, push: Push) -> DeviceReport:
    """Compare chains of smallest ops with and without transfers.

    Args:
        port: The device.
        peer: Where it sends to; itself if there is no other.
        push: Carries small tensors.
    """
    with port.current():
        value = torch.zeros(1, device=port.torch_device)
        side = torch.cuda.Stream(port.torch_device)
        flags = Flags([0], port.torch_device)
        flags.set_blocks({})  # nothing is due, so every wait finds its tensor there

    def receive(_: int) -> None:
        wait(flags, [0], WAIT_LIMIT_NS)

    def send(_: int) -> None:
        side.wait_stream(port.main)
        with torch.cuda.stream(side):
            push(
                port.out[:SMALL_WORDS],
                peer.into[:SMALL_WORDS],
                peer.flags.counter(0),
                port.flags.epoch,
            )

    plain = _chain_ns(port, value, side, None)
    num = OPS // EVERY
    return DeviceReport(
        name=port.name,
        send_overhead_ns=max(0, round((_chain_ns(port, value, side, send) - plain) / num)),
        receive_overhead_ns=max(0, round((_chain_ns(port, value, side, receive) - plain) / num)),
        fork_ns=_fork_ns(port, value, side),
        op_ns=round(plain / OPS),
        launch_gap_ns=_launch_gap_ns(port),
    )


def _chain_ns(port: Port, value: Any, side: Any, transfer: Any) -> int:
    """Time of a chain of ops, with a transfer after every EVERY of them, ns."""

    def record(clock: DeviceClock) -> None:
        clock.stamp("begin")
        for k in range(OPS):
            value.add_(1)
            if transfer is not None and k % EVERY == 0:
                transfer(k)
        clock.stamp("op")
        side.wait_stream(port.main)  # so that the side stream is part of the capture
        port.main.wait_stream(side)

    return least_gaps(stamped(port, record, 2, REPLAYS))[0]


def _fork_ns(port: Port, value: Any, side: Any) -> int:
    """How much later a kernel on a side stream starts than the next one in the chain, ns."""
    num = OPS // EVERY

    def forked(clock: DeviceClock) -> None:
        for _ in range(num):
            value.add_(1)
            clock.stamp("op")
            side.wait_stream(port.main)
            with torch.cuda.stream(side):
                clock.stamp("send")
            for _ in range(EVERY):
                value.add_(1)
        port.main.wait_stream(side)

    def linear(clock: DeviceClock) -> None:
        for _ in range(num):
            value.add_(1)
            clock.stamp("op")
            clock.stamp("op")
            for _ in range(EVERY):
                value.add_(1)

    late, usual = (
        median(least_gaps(stamped(port, record, 2 * num, REPLAYS))[::2])
        for record in (forked, linear)
    )
    return max(0, round(float(late - usual)))


def _launch_gap_ns(port: Port) -> int:
    """Time from the end of one kernel to the start of the next one in a chain, ns."""
    from devplace.run.cuda.probe import probe_kernels

    num = OPS // EVERY
    with port.current():
        spans = torch.zeros(2 * num, dtype=torch.int64, device=port.torch_device)

    def record(_: DeviceClock) -> None:
        for k in range(num):
            probe_kernels.span_kernel[(1,)](spans, 2 * k, num_warps=1)

    stamped(port, record, 1, 1)
    times = spans.tolist()
    gaps = [b - a for a, b in zip(times[1:-1:2], times[2::2], strict=True)]
    return max(0, round(float(median(gaps))))
