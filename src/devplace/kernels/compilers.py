"""A pool of processes that compile kernels in parallel."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from devplace.graph.fusion.call import FusedCall
from devplace.kernels.kernel_signature import Signature, place_of
from devplace.kernels.store import KernelStore
from devplace.machine.detect import num_cores

MAX_WORKERS = 8
JOBS_OF_A_WORKER = 4
"""Kernels that are worth starting a process for, which takes as long as compiling some."""
JOB_LIMIT_S = 120.0
"""Longest time for one kernel; then its ops run one by one."""
COMMAND = (sys.executable, "-m", "devplace.kernels.compile_worker")
Tell = Callable[[str], None]


class Job(NamedTuple):
    """A kernel to compile."""

    call: FusedCall
    signature: Signature


def store_of(job: Job) -> KernelStore:
    """Where a kernel is kept."""
    return KernelStore(place_of(job.signature.device))


def is_known(job: Job) -> bool:
    """Whether a kernel is on disk, or that it cannot be compiled."""
    store, key = store_of(job), job.signature.key
    return store.read(key) is not None or store.read_failure(key) is not None


class Compilers:
    """Compiling processes, which start while this one does other work.

    This process compiles as well, and some kernels are there before a new process has loaded torch;
    only the others try what they compiled.

    Args:
        most_jobs: Kernels that there will be at most, if that is known.
    """

    def __init__(self, most_jobs: int | None = None) -> None:
        count = min(MAX_WORKERS, num_cores() - 1)
        if most_jobs is not None:
            count = min(count, most_jobs // JOBS_OF_A_WORKER)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._workers = [_Worker(self._jobs, self._done) for _ in range(count)]

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def compile(self, jobs: Sequence[Job], tell: Tell) -> None:
        """Compile kernels; afterwards each, or the reason why there is none, is on disk.

        Args:
            jobs: The kernels.
            tell: Told how many are done.
        """
        for job in sorted(jobs, key=lambda job: -len(job.call.graph.nodes)):
            self._jobs.put(job)
        done = 0
        while done < len(jobs):
            tell(f"compiling kernels ({done + 1} of {len(jobs)})")
            more = self._compile_one() or self._wait()
            done += more
            is_any_alive = any(worker.is_alive for worker in self._workers)
            if not more and not is_any_alive and self._done.empty():
                return  # what processes that ended have left is compiled when it is met

    def _compile_one(self) -> int:
        """Compile a kernel in this process; tells how many."""
        from devplace.kernels.compile_worker import make

        try:
            job = self._jobs.get_nowait()
        except Empty:
            return 0
        if job is not None:
            make(job.call, job.signature, tries=False)
        return int(job is not None)

    def _wait(self) -> int:
        """Wait for a kernel of another process for a while; tells how many there were."""
        with contextlib.suppress(Empty):
            self._done.get(timeout=0.2)
            return 1
        return 0

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()


class _Worker:
    """One compiling process, and the thread that gives it its work."""

    def __init__(self, jobs: SimpleQueue[Job | None], done: SimpleQueue[None]) -> None:
        self._is_ending = False
        self._jobs, self._done = jobs, done
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it may still take kernels; one that ends has told of its last one."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        if not self._answers():  # to nothing: it has started
            return
        while (job := self._jobs.get()) is not None:
            is_good = self._ask(job)
            if not is_good and not self._is_ending:
                reason = "the compiler crashed, or did not end in time"
                store_of(job).write_failure(job.signature.key, reason)
            self._done.put(None)
            if not is_good:
                return
        self._jobs.put(None)  # the next thread ends, too

    def _ask(self, job: Job) -> bool:
        """Have a kernel compiled; tells whether the process is still good."""
        assert self._process.stdin is not None
        timer = threading.Timer(JOB_LIMIT_S, self._process.kill)
        timer.start()
        try:
            pickle.dump(tuple(job), self._process.stdin)
            self._process.stdin.flush()
            return self._answers()
        except OSError:
            return False
        finally:
            timer.cancel()

    def _answers(self) -> bool:
        assert self._process.stdout is not None
        return self._process.stdout.read(1) == b"\n"

    def end(self) -> None:
        """End the process."""
        self._is_ending = True
        self._jobs.put(None)
        self._process.kill()
        self._process.wait()
        self._thread.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
