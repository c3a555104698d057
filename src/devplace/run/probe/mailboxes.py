"""Probe of logical CPU devices: the mailbox between threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from statistics import median
from typing import Any

import torch

from devplace.run.codegen import StoppedError
from devplace.run.copies import clone_tensor
from devplace.run.mailbox import CopyFunction, Mailbox, make_post
from devplace.run.probe.channels import Pair
from devplace.run.probe.report import DeviceReport, StepReport
from devplace.run.workers import Workers
from devplace.schedule import PlannedTransfer

SIZES = (1024, 16 * 1024, 256 * 1024, 2**20, 4 * 2**20, 16 * 2**20)
ROUNDS = (60, 60, 60, 30, 16, 10)
CHECK_BYTES = (1024, 2**20)
OVERHEAD_ROUNDS = 50


class CpuBench:
    """Logical CPU devices, a thread each.

    Args:
        names: Their names.
        copy: Makes the copy of a tensor (for tests of faulty links).
    """

    switch_bytes = 0
    tells_sharing = False

    def __init__(self, names: Sequence[str], copy: CopyFunction = clone_tensor) -> None:
        self.names = tuple(names)
        self.pairs = tuple((a, b) for a in self.names for b in self.names if a != b)
        self._copy = copy
        self._workers = Workers([f"devplace probe {k}" for k in range(2 * len(self.names))])
        self._errors: list[BaseException] = []

    def ways(self, pair: Pair) -> tuple[str, ...]:
        """Copies only."""
        return ("copy",)

    def warm_up(self) -> None:
        """Nothing is compiled; the threads run once."""
        for queue in self._workers.queues:
            self._join([_later(queue, lambda: None, self._errors.append)])

    def check(self, pairs: Sequence[Pair], way: str) -> list[str]:
        """Carry random bytes, compare them with what was sent."""
        faults = [""] * len(pairs)
        for size in CHECK_BYTES:
            values = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in pairs]
            line = _Line(self, pairs, [size] * len(pairs))
            line.send_all([value.clone() for value in values])
            for k, value in enumerate(values):
                wrong = int((line.received[k] != value).sum())
                if wrong and not faults[k]:
                    faults[k] = f"returned wrong data ({wrong} of {size} bytes, by {way})"
        return faults

    def hops(self, pair: Pair) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
        """A tensor there and a small one back, less half a round of small ones."""
        self._round_ns(pair, SIZES[0], ROUNDS[0])  # wakes both threads up
        trips = [self._round_ns(pair, size, num) for size, num in zip(SIZES, ROUNDS, strict=True)]
        back = trips[0] / 2
        return SIZES, {"copy": tuple(max(1, round(trip - back)) for trip in trips)}

    def device(self, name: str, peers: Sequence[str]) -> DeviceReport:
        """What posting a small tensor takes, and picking up one that is there."""
        if not peers:
            return DeviceReport(name=name, send_overhead_ns=0, receive_overhead_ns=0)
        line = _Line(self, [(name, peers[0])], [SIZES[0]])
        value = torch.zeros(SIZES[0], dtype=torch.uint8)
        sends, receives = [], []

        def job() -> None:
            for _ in range(OVERHEAD_ROUNDS):
                begin = time.perf_counter_ns()
                line.posts[0](0, value)
                middle = time.perf_counter_ns()
                line.mailbox.receive(0)
                sends.append(middle - begin)
                receives.append(time.perf_counter_ns() - middle)

        self._join([_later(self.queue(name), job, line.failed)])
        return DeviceReport(
            name=name,
            send_overhead_ns=round(median(sends)),
            receive_overhead_ns=round(median(receives)),
        )

    def together_ns(self, pairs: Sequence[Pair]) -> Sequence[int]:
        """Never asked for: threads share whatever cores and memory there are."""
        raise NotImplementedError

    def step(self) -> StepReport | None:
        """Not measured."""
        return None

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def queue(self, name: str, copies: bool = False) -> SimpleQueue[Any]:
        """Jobs of a device, or of its copy thread."""
        return self._workers.queues[self.names.index(name) + copies * len(self.names)]

    def _round_ns(self, pair: Pair, size: int, rounds: int) -> float:
        line = _Line(self, [pair, pair[::-1]], [size, SIZES[0]])
        there = torch.zeros(size, dtype=torch.uint8)
        back = torch.zeros(SIZES[0], dtype=torch.uint8)
        times: list[int] = []

        def ping() -> None:
            for _ in range(rounds):
                begin = time.perf_counter_ns()
                line.posts[0](0, there)
                line.mailbox.receive(1)
                times.append(time.perf_counter_ns() - begin)

        def pong() -> None:
            for _ in range(rounds):
                line.mailbox.receive(0)
                line.posts[1](1, back)

        jobs = [(pair[1], pong), (pair[0], ping)]
        self._join([_later(self.queue(name), job, line.failed) for name, job in jobs])
        return float(median(times))

    def _join(self, done: Sequence[SimpleQueue[None]]) -> None:
        for one in done:
            one.get()
        if self._errors:
            raise self._errors[0]


class _Line:
    """A mailbox with one slot per pair."""

    def __init__(self, bench: CpuBench, pairs: Sequence[Pair], sizes: Sequence[int]) -> None:
        index = bench.names.index
        transfers = [
            PlannedTransfer(0, index(src), index(dst), size)
            for (src, dst), size in zip(pairs, sizes, strict=True)
        ]
        self._bench = bench
        self._pairs = pairs
        self.mailbox = Mailbox(transfers, bench._copy)
        self.received: list[Any] = [None] * len(pairs)
        self.posts = [
            make_post(
                self.mailbox,
                transfers,
                bench.queue(src, copies=True),
                lambda _, error: self.failed(error),
            )
            for src, _ in pairs
        ]

    def send_all(self, values: Sequence[Any]) -> None:
        """Send a value on every pair at once, and pick them up."""
        done = []
        for k, (src, dst) in enumerate(self._pairs):
            done.append(_later(self._bench.queue(src), self._send(k, values[k]), self.failed))
            done.append(_later(self._bench.queue(dst), self._take(k), self.failed))
        self._bench._join(done)

    def failed(self, error: BaseException) -> None:
        """Note an error, and let nobody wait for what will not come."""
        if not isinstance(error, StoppedError):
            self._bench._errors.append(error)
            self.mailbox.abort(str(error))

    def _send(self, k: int, value: Any) -> Callable[[], None]:
        return lambda: self.posts[k](k, value)

    def _take(self, k: int) -> Callable[[], None]:
        def job() -> None:
            self.received[k] = self.mailbox.receive(k)

        return job


def _later(
    queue: SimpleQueue[Any], job: Callable[[], None], failed: Callable[[BaseException], None]
) -> SimpleQueue[None]:
    """Have a thread do a job; the queue returned gets a token at its end."""
    done: SimpleQueue[None] = SimpleQueue()

    def guarded() -> None:
        try:
            job()
        except BaseException as error:
            failed(error)
        finally:
            done.put(None)

    queue.put(guarded)
    return done
