"""Compile all kernels of a step beforehand, side by side in processes of their own."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from devplace.errors import ExecutionError
from devplace.graph.fusion.call import FusedCall
from devplace.graph.graph import OpGraph
from devplace.graph.overwrite import overwritten_sources
from devplace.kernels.fused import source_of, why_not_compiled
from devplace.kernels.signature import Signature, Writes, place_of, signature_of
from devplace.kernels.store import KernelStore
from devplace.machine.detect import num_cores

MAX_WORKERS = 16
MIN_JOBS = 3
"""Kernels from which on processes are started for them; that takes some seconds."""
JOB_LIMIT_S = 120.0
"""Longest time for one kernel; then its ops run one by one."""
COMMAND = (sys.executable, "-m", "devplace.kernels.worker")
Tell = Callable[[str], None]


class Prepared(NamedTuple):
    """What was done.

    Attributes:
        kernels: Distinct kernels of the step, on all devices.
        compiled: Of these, how many were not on disk.
        refused: Of these, how many could not be compiled; their ops run one by one.
        seconds: Time it took, s.
    """

    kernels: int
    compiled: int
    refused: int
    seconds: float

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        found = []
        if self.compiled:
            found.append(f"{self.compiled} kernels were compiled in {self.seconds:.1f} s")
        if self.refused:
            found.append(
                f"{self.refused} of {self.kernels} groups of ops could not be compiled: their ops "
                f"run one by one"
            )
        return tuple(found)


class Job(NamedTuple):
    """A kernel to compile."""

    call: FusedCall
    signature: Signature


def prepare(graph: OpGraph, devices: Sequence[str], tell: Tell | None = None) -> Prepared:
    """Compile the kernels of a fused step for the layouts of its capture, and keep them on disk.

    Args:
        graph: A captured step.
        devices: torch devices it may run on; of several cards of one model every one is named.
        tell: Told how far it is.

    Returns:
        What was done. Layouts that only a real step shows are compiled when they are met.
    """
    begin = time.monotonic()
    usable = [device for device in devices if not why_not_compiled(device)]
    jobs = list(_jobs(graph, usable))
    missing = [job for job in jobs if not _is_known(job)]
    if missing:
        _compile(missing, tell or (lambda text: None))
    refused = sum(_store(job).read_failure(job.signature.key) is not None for job in jobs)
    return Prepared(len(jobs), len(missing), refused, time.monotonic() - begin)


def _jobs(graph: OpGraph, devices: Sequence[str]) -> Iterator[Job]:
    if graph.program is None:
        return
    over = overwritten_sources(graph)
    seen: set[Signature] = set()
    for node in graph.program.module.graph.nodes:
        if not isinstance(node.target, FusedCall) or "val" not in node.meta:
            continue
        tensors = [arg.meta["val"] for arg in node.args]
        for device in devices:
            # Only steps on GPUs write over the old values.
            fully = _writes(graph, node, over) if device.startswith("cuda") else ()
            for writes in dict.fromkeys([(), fully]):
                signature = signature_of(node.target.name, device, tensors, writes)
                if signature not in seen:
                    seen.add(signature)
                    yield Job(node.target, signature)


def _writes(graph: OpGraph, node: Any, over: dict[int, int]) -> Writes:
    """What a group writes over if nothing reads the old values after it."""
    program = graph.program
    outputs = graph.ops[program.op_of[node.name]].outputs
    places = {program.op_of[arg.name]: k for k, arg in enumerate(node.args)}
    return tuple((k, places[over[tensor]]) for k, tensor in enumerate(outputs) if tensor in over)


def _store(job: Job) -> KernelStore:
    return KernelStore(place_of(job.signature.device))


def _is_known(job: Job) -> bool:
    store, key = _store(job), job.signature.key
    return store.read(key) is not None or store.read_failure(key) is not None


def _compile(jobs: list[Job], tell: Tell) -> None:
    count = min(MAX_WORKERS, num_cores(), len(jobs) // 2)
    if len(jobs) < MIN_JOBS or count < 2:
        for number, job in enumerate(jobs, start=1):
            tell(f"compiling kernels ({number} of {len(jobs)})")
            _compile_here(job)
        return
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in sorted(jobs, key=lambda job: -len(job.call.graph.nodes)):
        queue.put(job)
    done: SimpleQueue[None] = SimpleQueue()
    workers = [_Worker(queue, done) for _ in range(count)]
    try:
        for number in range(1, len(jobs) + 1):
            while True:
                try:
                    done.get(timeout=1.0)
                    break
                except Empty:
                    if not any(worker.is_at_work for worker in workers):
                        return  # what they left is compiled when it is met
            tell(f"compiling kernels ({number} of {len(jobs)})")
    finally:
        for worker in workers:
            worker.end()


def _compile_here(job: Job) -> None:
    with contextlib.suppress(ExecutionError):  # it is noted on disk
        source_of(job.call, job.signature)


class _Worker:
    """One compiling process, and the thread that gives it its work."""

    def __init__(self, queue: SimpleQueue[Job], done: SimpleQueue[None]) -> None:
        self._queue, self._done = queue, done
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
    def is_at_work(self) -> bool:
        """Whether it may still finish a kernel."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                return
            if not self._ask(job):
                reason = "the compiler crashed, or did not end in time"
                _store(job).write_failure(job.signature.key, reason)
                self._done.put(None)
                return
            self._done.put(None)

    def _ask(self, job: Job) -> bool:
        """Have a kernel compiled; tells whether the process is still good."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(JOB_LIMIT_S, self._process.kill)
        timer.start()
        try:
            pickle.dump(tuple(job), self._process.stdin)
            self._process.stdin.flush()
            return self._process.stdout.read(1) == b"\n"
        except OSError:
            return False
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._thread.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
