"""Persistent threads: one per logical device, and one for its copies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

Job = Callable[[], None]


class Workers:
    """A fixed set of threads, each running the jobs put into its queue one after another.

    Each runs torch ops without autograd. The number of threads that the user's own thread works
    with is left as it was.

    Args:
        names: Of the threads.
        num_op_threads: Threads that each uses inside an op.
    """

    def __init__(self, names: list[str], num_op_threads: int = 1) -> None:
        self.queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in names]
        num_threads = torch.get_num_threads()
        started = threading.Barrier(len(names) + 1)
        for name, queue in zip(names, self.queues, strict=True):
            args = (queue, started, num_op_threads)
            threading.Thread(target=_serve, args=args, name=name, daemon=True).start()
        started.wait()
        # set_num_threads acts on the calling thread and on the default for threads yet to come.
        torch.set_num_threads(num_threads)
        self._finalizer = weakref.finalize(self, _end, self.queues)

    @property
    def is_closed(self) -> bool:
        """Whether the threads have been told to end; jobs put now are never done."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End the threads once they have done their present jobs."""
        self._finalizer()


def _end(queues: list[Any]) -> None:
    for queue in queues:
        queue.put(None)


def _serve(queue: SimpleQueue[Job | None], started: threading.Barrier, num_op_threads: int) -> None:
    torch.get_num_threads()  # a thread's first look takes the default over, whatever was set before
    torch.set_num_threads(num_op_threads)
    started.wait()
    with torch.no_grad():
        while (job := queue.get()) is not None:
            job()
            del job
