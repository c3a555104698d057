"""Tensors in flight between logical devices of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from devplace.run.codegen import StoppedError
from devplace.schedule import PlannedTransfer

CopyFunction = Callable[[Any, PlannedTransfer], Any]

# Copies up to this size are made by the sender's own thread: handing one to another thread takes
# 8-50 us (benchmarks/executor.py, two shared x86 cores), copying this much 25 us at 10 GB/s.
INLINE_BYTES = 256 * 1024


class Mailbox:
    """One slot per transfer; each has one sender and one receiver.

    A slot's lock is held except between arrival and pick-up, so it is ready for the next step as
    soon as it was emptied. After a failure a mailbox is thrown away.
    """

    def __init__(self, transfers: Sequence[PlannedTransfer], copy: CopyFunction) -> None:
        self._transfers = transfers
        self._copy = copy
        self._values: list[Any] = [None] * len(transfers)
        self._locks = [threading.Lock() for _ in transfers]
        for lock in self._locks:
            lock.acquire()
        self.times: list[tuple[int, int]] | None = None
        self.stop: list[str] = []

    def deliver(self, index: int, value: Any) -> None:
        """Copy a tensor and hand it to the receiver."""
        start = time.perf_counter_ns()
        copied = self._copy(value, self._transfers[index])
        if self.times is not None:
            self.times[index] = (start, time.perf_counter_ns())
        self.hand_over(index, copied)

    def hand_over(self, index: int, value: Any) -> None:
        """Hand the receiver a tensor that is nobody else's."""
        self._values[index] = value
        self._locks[index].release()

    def receive(self, index: int) -> Any:
        """Wait for a tensor and take it out.

        Raises:
            StoppedError: The step was given up.
        """
        self._locks[index].acquire()
        if self.stop:
            raise StoppedError
        value = self._values[index]
        self._values[index] = None
        return value

    def abort(self, reason: str) -> None:
        """Make every device that waits, or will wait, give up the step."""
        self.stop.append(reason)
        for lock in self._locks:
            try:
                lock.release()
            except RuntimeError:  # it had arrived
                continue


def make_post(
    mailbox: Mailbox, transfers: Sequence[PlannedTransfer], queue: SimpleQueue[Any], failed: Any
) -> Callable[[int, Any], None]:
    """Make the `post` of a device: small copies at once, large ones on its copy thread."""

    def post(index: int, value: Any) -> None:
        if transfers[index].num_bytes <= INLINE_BYTES:
            mailbox.deliver(index, value)
        else:
            queue.put(lambda: _deliver_or_fail(mailbox, index, value, failed))

    return post


def _deliver_or_fail(mailbox: Mailbox, index: int, value: Any, failed: Any) -> None:
    try:
        mailbox.deliver(index, value)
    except BaseException as error:
        failed(index, error)
