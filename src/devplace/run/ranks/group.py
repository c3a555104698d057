"""The processes that run a step together: their messages, and what becomes of one that fails."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from devplace import __version__
from devplace.errors import InputError, PlanMismatchError, RankError
from devplace.run.workers import Workers

T = TypeVar("T")

POLL_S = 0.5
"""How often a process that waits looks whether another one has failed, s."""
# Of the time limit, for what follows once a process has waited too long: finding out who is to
# blame, and the end of the process.
MARGIN_S = 8.0
_FRESH_S = 3 * POLL_S
_LAST_S = 5.0
_SPIN_S = 0.1
ALL = -1
"""In place of a process that is waited for."""
# All messages of a step are inside its graphs, which follow each other on one stream. To let those
# inside and outside of graphs be mixed, NCCL puts event nodes beside its own into a graph, and CUDA
# may queue one behind work that keeps it waiting (NVIDIA/nccl issue 1901, torchcomms pull 3358).
_NCCL_SETTINGS = {
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
_numbers = itertools.count()
_failures: list[str] = []


def several_processes() -> bool:
    """Whether this is one of several processes of `torchrun`, or of a process group."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return bool(dist.get_world_size() > 1)
    return bool(dist.is_torchelastic_launched()) and int(os.environ.get("WORLD_SIZE", "1")) > 1


class Group:
    """All processes of the default process group, which is made if there is none yet.

    Messages between two processes go by gloo. They are carried by one thread of each process, so
    that the caller can watch the others meanwhile. What processes tell each other beside that lies
    in the store of the process group. Every process makes its groups in the same order.

    Args:
        timeout_s: In which every process ends after one has failed, s.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        hosts: Name of every process's host.
        failure: Why the group is over; empty while it is not.

    Raises:
        RankError: A process did not come in time.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        if not timeout_s >= 2 * MARGIN_S:
            raise InputError(f"timeout_s must be at least {2 * MARGIN_S:.0f} s, got {timeout_s}.")
        self._limit_s = timeout_s - MARGIN_S
        for name, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        is_made = dist.is_initialized()
        store = dist.distributed_c10d._get_default_store() if is_made else _new_store(timeout_s)
        self.rank = dist.get_rank() if is_made else int(os.environ["RANK"])
        self.size = dist.get_world_size() if is_made else int(os.environ["WORLD_SIZE"])
        self.hosts = [""] * self.size
        self.failure = ""
        self._store = dist.PrefixStore(f"devplace/{next(_numbers)}", store)
        self._published = ""
        self._looks = self._exchanged = 0
        self._peer: int | None = None
        self._workers = Workers([f"devplace rank {self.rank}"])
        self.hosts = self.exchange("host", socket.gethostname(), "compile")
        if not is_made:
            _join(store, self.rank, self.size)
        with self.failing_together():
            versions = {"torch": torch.__version__, "devplace": __version__}
            self.require_equal("versions", versions)
        self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit_s))

    def name(self, rank: int) -> str:
        """A process as messages call it."""
        host = self.hosts[rank]
        return f"rank {rank} on host {host}" if host else f"rank {rank}"

    def exchange(self, topic: str, value: Any, where: str) -> list[Any]:
        """What every process gives, by rank.

        A process that is in a block of `keeping_alive` is waited for, however long that takes.

        Args:
            topic: What it is about; all processes exchange the same in the same order.
            value: Plain JSON.
            where: What the processes are at, for messages.

        Raises:
            RankError: A process failed, or did not come in time.
        """
        self._exchanged += 1
        keys = [f"{topic}/{self._exchanged}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], json.dumps(value))
            self._await(keys, where)
            return [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise self._failed(self._gone(error)) from error

    def require_equal(self, topic: str, facts: Mapping[str, Any]) -> None:
        """See that all processes have the same.

        Args:
            topic: Of `exchange`.
            facts: What it is -> plain JSON; the first that differs is named.

        Raises:
            PlanMismatchError: Names a process that differs from the first, and in what.
        """
        found = self.exchange(topic, facts, "compile")
        for what in facts:
            for rank, other in enumerate(found):
                if other[what] != found[0][what]:
                    raise PlanMismatchError(
                        f"Processes that run a step together must have the same {what}: "
                        f"{self.name(rank)} has {other[what]}, {self.name(0)} {found[0][what]}. "
                        f"Start all of them with the same program, files and versions."
                    )

    def send(self, message: Any, rank: int) -> None:
        """Send a tensor on the CPU to a process that receives it; ends when it has it, or may have.

        Raises:
            RankError: The other one is gone, or did not take it in time.
        """
        self._carry(dist.send, message, rank)

    def receive(self, message: Any, rank: int) -> None:
        """Receive a tensor into another one, from a process that sends it.

        Raises:
            RankError: The other one is gone, or did not send it in time.
        """
        self._carry(dist.recv, message, rank)

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done by the thread that carries messages, after those submitted before."""
        self._workers.queues[0].put(job)

    def run(self, job: Callable[[], T]) -> T:
        """Have a job done by that thread, and watch the other processes meanwhile.

        Raises:
            RankError: Another process failed.
        """
        done: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def task() -> None:
            try:
                done.put((job(), None))
            except BaseException as error:
                done.put((None, error))

        self.submit(task)
        value, error = self.take(done)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def take(self, queue: SimpleQueue[T]) -> T:
        """The next thing of a queue, which this process or another makes come.

        Raises:
            RankError: Another process failed.
        """
        while True:
            self.check()
            try:
                return queue.get(timeout=POLL_S)
            except Empty:
                self._publish()
                self._raise_failure()

    def check(self) -> None:
        """See that the group is not over, as far as this process knows.

        Raises:
            RankError: A process failed.
        """
        if self.failure:
            raise self._failed(self.failure)

    def poll(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is done that all processes do together.

        Raises:
            RankError: Another process failed, or is not waiting although it is not done.
        """
        begin = looked = time.monotonic()
        self._peer = ALL
        while not is_done():
            now = time.monotonic()
            if now - looked > POLL_S:
                looked = now
                self._publish()
                self._raise_failure()
            if now - begin > self._limit_s:
                raise self._late(ALL)
            time.sleep(0 if now - begin < _SPIN_S else 1e-4)
        self._peer = None

    def fail(self, cause: str, rank: int | None = None) -> RankError:
        """End the group, here and, as soon as they look, in all other processes.

        Args:
            cause: What happened.
            rank: Where; here by default.

        Returns:
            The error to raise: of the first failure, which may be another one.
        """
        who = self.rank if rank is None else rank
        told = f"{self.name(who)}: {cause.rstrip('.')}"
        with suppress(RuntimeError):  # the store may be gone with the process that holds it
            told = self._store.compare_set("failure", "", told).decode()
        return self._failed(told)

    @contextmanager
    def keeping_alive(self) -> Iterator[None]:
        """Let the others wait while this process does something that takes long."""
        is_over = threading.Event()

        def beat() -> None:
            for number in itertools.count():
                with suppress(RuntimeError):
                    self._store.set(f"alive/{self.rank}", str(number))
                if is_over.wait(2 * POLL_S):
                    return

        thread = threading.Thread(target=beat, name="devplace alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """If this process raises in the block, the others do so, too."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {_first_line(error)}")
            raise

    def close(self) -> None:
        """Give up what was held; the other processes are not waited for."""
        if not self.failure:
            self.failure = "the step was closed"
            self._workers.close()
            dist.destroy_process_group(self._gloo)

    def _end(self) -> None:
        """At exit: the first process, which may hold the store, waits until others know the cause.

        A thread that came back from gloo while Python ends would crash the process. It mostly comes
        back when the others end. Where it waits for a process that hangs, this one ends at once, as
        failed as it is.
        """
        until = time.monotonic() + _LAST_S
        others = [f"knows/{rank}" for rank in range(1, self.size)]
        with suppress(RuntimeError):
            while self.rank == 0 and not self._store.check(others) and time.monotonic() < until:
                time.sleep(0.01)
        is_idle = threading.Event()
        self.submit(is_idle.set)
        if not is_idle.wait(max(POLL_S, until - time.monotonic())):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _failed(self, told: str) -> RankError:
        if not self.failure:
            self.failure = told
            _failures.append(told)
            with suppress(RuntimeError):
                self._store.set(f"knows/{self.rank}", "")
            atexit.register(self._end)
        return RankError(
            f"A step over several processes ends with the first that fails, {self.failure}. What "
            f"was trained since the last checkpoint is lost; start all processes again."
        )

    def _raise_failure(self) -> None:
        told = self._heard()
        if told:
            raise self._failed(told)

    def _heard(self) -> str:
        """Why the group is over, as far as this process can know; empty while it is not."""
        try:
            return self.failure or self._told("failure")
        except RuntimeError as error:
            return self._gone(error)

    def _gone(self, error: RuntimeError) -> str:
        return f"{self.name(0)}: the store of the process group is gone ({_first_line(error)})"

    def _await(self, keys: Sequence[str], where: str) -> None:
        """Wait for what every process puts into the store, by rank; see `exchange`.

        A failure counts only while some of it is missing: where all is there, a process may already
        have failed because what it found differs, and this one is to find the same itself.
        """
        until = time.monotonic() + self._limit_s
        beats = [""] * self.size
        for rank, key in enumerate(keys):
            while not self._store.check([key]):
                told = self._heard()
                if told and not self._store.check(list(keys)):
                    raise self._failed(told)
                beat = self._told(f"alive/{rank}")
                if beat != beats[rank]:
                    beats[rank], until = beat, time.monotonic() + self._limit_s
                if time.monotonic() > until:
                    cause = f"it did not come to {where} within {self._limit_s:.0f} s"
                    raise self.fail(cause, rank)
                time.sleep(0.01)

    def _carry(self, call: Callable[..., Any], message: Any, rank: int) -> None:
        begin = time.monotonic()
        self._peer = rank
        try:
            call(message, rank, group=self._gloo)
        except RuntimeError as error:
            if time.monotonic() - begin < 0.9 * self._limit_s:
                cause = f"its connection to {self.name(self.rank)} is gone ({_first_line(error)})"
                raise self.fail(f"{cause}; see what it said last", rank) from error
            raise self._late(rank) from error
        self._peer = None

    def _publish(self) -> None:
        """Tell the others whom this process waits for, and that it still looks."""
        peer = self._peer
        if peer is None and not self._published:
            return
        self._looks += 1
        self._published = "" if peer is None else f"{peer} {self._looks}"
        with suppress(RuntimeError):
            self._store.set(f"waits/{self.rank}", self._published)

    def _late(self, peer: int) -> RankError:
        """Who is to blame that a process, or any of all, did not answer: the first of those that
        wait for each other which does not wait itself."""
        before = self._waits()
        time.sleep(_FRESH_S)
        after = self._waits()
        after[self.rank] = f"{peer} now"
        if peer == ALL:
            silent = [r for r in range(self.size) if not after[r] or after[r] == before[r]]
            peer = silent[0] if silent else (self.rank + 1) % self.size
        seen = [self.rank]
        while peer not in seen:
            if not after[peer] or after[peer] == before[peer]:
                cause = f"{self.name(self.rank)} has waited for it for {self._limit_s:.0f} s"
                return self.fail(f"it hangs, or was not called: {cause}", peer)
            seen.append(peer)
            peer = int(after[peer].split()[0])
            peer = seen[-1] if peer == ALL else peer
        ring = ", ".join(f"rank {rank} for rank {other}" for rank, other in _ring(seen))
        return self.fail(f"processes wait for each other ({ring})", peer)

    def _waits(self) -> list[str]:
        """Of every process whom it waits for, and how often it has said so; empty if for none."""
        return [self._told(f"waits/{rank}") for rank in range(self.size)]

    def _told(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _ring(ranks: list[int]) -> list[tuple[int, int]]:
    return list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))


def _new_store(timeout_s: float) -> Any:
    """The store that torchrun has, or else one that rank 0 holds; nobody is waited for."""
    timeout = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0",
        timeout=timeout,
        wait_for_workers=False,
    )


def _join(store: Any, rank: int, size: int) -> None:
    """Make the default process group, once all have come."""
    kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    own = dist.PrefixStore("torch", store)
    dist.init_process_group(kind, store=own, rank=rank, world_size=size)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized() and not _failures:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    """What an error says first; of gloo's without its place in the source and advice."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return re.sub(r"^\[[^\]]*\] ", "", line).split(". This is typically")[0]
