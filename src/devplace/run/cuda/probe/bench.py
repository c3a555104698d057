"""The GPUs of this computer, and its host, as a bench."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from devplace.errors import ExecutionError
from devplace.run.cuda.device_memory import allowed_bytes
from devplace.run.cuda.probe.hops import HOST_LARGEST, ROUNDS, hop_times, host_times
from devplace.run.cuda.probe.overheads import measure_overheads
from devplace.run.cuda.probe.port import WAIT_LIMIT_NS, Port, copy_bytes, pattern
from devplace.run.cuda.probe.steps import measure_steps
from devplace.run.cuda.push import Push, push_by_engine, push_by_kernel, wait
from devplace.run.probe.channels import Pair
from devplace.run.probe.report import HOST, DeviceReport, StepReport
from devplace.run.workers import Workers
from devplace.schedule.rough_times import COPY_ENGINE_BYTES

SIZES = tuple(ROUNDS)
CHECK_BYTES = (2**10, 2**20, 2**25)
HOST_CHECK_BYTES = (2**10, 2**22)
SHARED_BYTES = 2**25
SHARED_ROUNDS = 8
FREE_SHARE = 8
"""Buffers take at most one part in so many of the memory that the process may still take."""


class CudaBench:
    """GPUs and the host.

    Args:
        names: Torch names of the GPUs.
        push_kernel: Carries by a kernel (another one for tests of faulty links).
        push_engine: Carries by the copy engine.
    """

    switch_bytes = COPY_ENGINE_BYTES
    tells_sharing = True

    def __init__(
        self,
        names: Sequence[str],
        push_kernel: Push = push_by_kernel,
        push_engine: Push = push_by_engine,
    ) -> None:
        self._ports = {name: Port(index, name) for index, name in enumerate(names)}
        self.names = tuple(names)
        self._pushes: dict[str, Push] = {"kernel": push_kernel, "engine": push_engine}
        peers = [(a, b) for a in names for b in names if a != b and self._has_access(a, b)]
        host = [pair for name in names for pair in ((HOST, name), (name, HOST))]
        self.pairs: tuple[Pair, ...] = (*peers, *host)
        self._workers = Workers([f"devplace probe {name}" for name in names])
        self._blocks: dict[tuple[str, int], int] = {}
        self._sizes: tuple[int, ...] = ()
        self._host_out: Any = None
        self._host_into: Any = None
        self._seed = 0

    def ways(self, pair: Pair) -> tuple[str, ...]:
        """Kernel and engine between GPUs; copies with the host."""
        return ("copy",) if HOST in pair else tuple(self._pushes)

    def warm_up(self) -> None:
        """Contexts, peer access, buffers, and every kernel once on every device."""
        free = min(allowed_bytes(port) for port in self._all())
        self._sizes = tuple(s for s in SIZES if 2 * s * FREE_SHARE <= free) or SIZES[:1]
        for port in self._all():
            port.allocate(self._sizes[-1])
        host = torch.zeros(min(HOST_LARGEST, self._sizes[-1]) // 4, dtype=torch.int32)
        self._host_out, self._host_into = host.pin_memory(), host.pin_memory()
        for src, dst in self.pairs:
            if HOST not in (src, dst):  # a copy by torch switches peer access on
                torch.zeros(1, device=src).to(dst)
        for port in self._all():
            for way, push in self._pushes.items():
                for size in self._sizes:
                    with port.current():
                        words = size // 4
                        flag = port.flags.counter(0)
                        self._blocks[way, size] = push(
                            port.out[:words], port.into[:words], flag, port.flags.epoch
                        )
            with port.current():
                wait(port.flags, [0], WAIT_LIMIT_NS)  # nothing is due in epoch 0
            port.rehearse()

    def check(self, pairs: Sequence[Pair], way: str) -> list[str]:
        """Send words made on the sender; compare with the same words made on the receiver."""
        for size in HOST_CHECK_BYTES if way == "copy" else CHECK_BYTES:
            if size > self._sizes[-1]:
                continue
            sent = [self._prepare(src, dst, size // 4) for src, dst in pairs]
            try:
                how = self._check_host if way == "copy" else self._check_peers
                found = how(pairs, way, size, sent)
            except ExecutionError as error:
                found = [str(error)] * len(pairs)
            if any(found):
                return found
        return [""] * len(pairs)

    def hops(self, pair: Pair) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
        """By ping-pong between GPUs, by a chain of copies with the host."""
        src, dst = pair
        if HOST not in pair:
            ends = self._ports[src], self._ports[dst]
            times = hop_times(*ends, self._pushes, self._blocks, self._sizes, self._workers)
            return self._sizes, times
        sizes = tuple(size for size in self._sizes if size <= HOST_LARGEST)
        port = self._ports[dst if src == HOST else src]
        target, source = self._buffers(src, dst)
        return sizes, {"copy": host_times(port, target, source, sizes)}

    def device(self, name: str, peers: Sequence[str]) -> DeviceReport:
        """Of sends to the first peer; to itself if there is none."""
        port = self._ports[name]
        peer = next((self._ports[other] for other in peers if other != HOST), port)
        return measure_overheads(port, peer, self._pushes["kernel"])

    def together_ns(self, pairs: Sequence[Pair]) -> Sequence[int]:
        """Each on a stream of its own, by the copy engine."""
        size = min(SHARED_BYTES, self._sizes[-1], HOST_LARGEST)
        events = []
        for src, dst in pairs:
            port = self._ports[dst if src == HOST else src]
            with torch.cuda.device(port.torch_device):
                stream = torch.cuda.Stream(port.torch_device)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with torch.cuda.stream(stream):
                    begin.record(stream)
                    for _ in range(SHARED_ROUNDS):
                        target, source = self._buffers(src, dst)
                        copy_bytes(target, source, size, stream)
                    end.record(stream)
            events.append((begin, end))
        self._synchronize()
        return [max(1, round(begin.elapsed_time(end) * 1e6)) for begin, end in events]

    def step(self) -> StepReport:
        """Of all GPUs together."""
        return measure_steps(self._all(), self._workers)

    def close(self) -> None:
        """End the threads and give memory back."""
        self._workers.close()
        for port in self._all():
            port.out = port.into = port.flags = None
            with suppress(RuntimeError):  # a stream that failed is of no use to others
                port.synchronize()
                port.give_up_stream()
        self._host_out = self._host_into = None
        with suppress(RuntimeError):  # after a failure of a device; that one is told
            torch.cuda.empty_cache()

    def _all(self) -> list[Port]:
        return list(self._ports.values())

    def _has_access(self, src: str, dst: str) -> bool:
        return bool(torch.cuda.can_device_access_peer(torch.device(src), torch.device(dst)))

    def _buffers(self, src: str, dst: str) -> tuple[Any, Any]:
        """Where it goes, and where it comes from."""
        target = self._host_into if dst == HOST else self._ports[dst].into
        source = self._host_out if src == HOST else self._ports[src].out
        return target, source

    def _prepare(self, src: str, dst: str, words: int) -> Any:
        """Put words where they are sent from, and others where they go; the words, over there."""
        self._seed += 1
        target, source = self._buffers(src, dst)
        for buffer, inverted in ((source, False), (target, True)):
            sent = pattern(words, self._seed, buffer.device)
            buffer[:words].copy_(sent.bitwise_not_() if inverted else sent)
        sent.bitwise_not_()
        self._synchronize()
        return sent

    def _check_peers(
        self, pairs: Sequence[Pair], way: str, size: int, sent: Sequence[Any]
    ) -> list[str]:
        words, due = size // 4, self._blocks[way, size]
        receivers = [self._ports[dst] for _, dst in pairs]
        for port in self._all():
            with port.current():
                port.flags.reset()
                port.flags.set_blocks({0: due})
                port.flags.epoch.add_(1)
        self._synchronize()
        for (src, _), receiver in zip(pairs, receivers, strict=True):
            sender = self._ports[src]
            with sender.current():
                flag = receiver.flags.counter(0)
                self._pushes[way](
                    sender.out[:words], receiver.into[:words], flag, sender.flags.epoch
                )
        wrong = []
        for port, right in zip(receivers, sent, strict=True):
            with port.current():  # nothing but the flag orders this behind the push
                wait(port.flags, [0], WAIT_LIMIT_NS)
                wrong.append((port.into[:words] != right).sum())
        self._synchronize()
        return [
            _fault(port, way, size, due, int(num))
            for port, num in zip(receivers, wrong, strict=True)
        ]

    def _check_host(
        self, pairs: Sequence[Pair], way: str, size: int, sent: Sequence[Any]
    ) -> list[str]:
        streams = []
        for src, dst in pairs:
            port = self._ports[dst if src == HOST else src]
            with port.current():
                streams.append(torch.cuda.Stream(port.torch_device))
                copy_bytes(*self._buffers(src, dst), size, streams[-1])
        self._synchronize()
        faults = []
        for (src, dst), right in zip(pairs, sent, strict=True):
            num = int((self._buffers(src, dst)[0][: size // 4] != right).sum())
            faults.append(_wrong(way, size, num) if num else "")
        return faults

    def _synchronize(self) -> None:
        for port in self._all():
            port.synchronize_all()


def _fault(port: Port, way: str, size: int, due: int, num_wrong: int) -> str:
    if int(port.flags.error):
        return f"did not arrive within {WAIT_LIMIT_NS / 1e9:g} s ({size} bytes, by {way})"
    if num_wrong:
        return _wrong(way, size, num_wrong)
    counted = int(port.flags.counter(0))
    if counted != due:
        return f"raised its flag to {counted} instead of {due} ({size} bytes, by {way})"
    return ""


def _wrong(way: str, size: int, num_wrong: int) -> str:
    return f"returned wrong data ({num_wrong} of {size // 4} words, by {way})"
