"""CPU devices beside GPUs: a host thread each, running its ops while the GPUs replay graphs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from devplace.errors import ExecutionError
from devplace.run.codegen import DeviceCode, StoppedError, failed_instruction, generate
from devplace.run.copies import clone_tensor
from devplace.run.cuda.device_pass import describe_op
from devplace.run.cuda.pinned import PinnedBoard
from devplace.run.cuda.routes import Route
from devplace.run.mailbox import Mailbox
from devplace.run.workers import Workers
from devplace.schedule import Schedule


class LateError(Exception):
    """A tensor did not come in time; `transfer` says which."""

    def __init__(self, transfer: int) -> None:
        super().__init__(transfer)
        self.transfer = transfer


class HostDevice:
    """A CPU device of a plan that has GPUs too; has what the executor needs of a `CudaDevice`.

    Args:
        index: Its index in the schedule.
        replaced: Source ops that a step gives new values.

    Attributes:
        torch_device: The CPU.
        buffers: Source op -> its value between steps.
        join: Waits for the step in flight.
    """

    def __init__(self, index: int, replaced: frozenset[int] = frozenset()) -> None:
        self.index = index
        self.torch_device = torch.device("cpu")
        self.buffers: dict[int, Any] = {}
        self.join: Callable[[], None] = _nothing
        self._replaced = replaced

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Nothing to set: a CPU has no streams."""
        yield

    def put(self, op: int, value: Any) -> None:
        """Give a source op its value: a copy. A step in flight keeps the one it began with."""
        if op in self._replaced:
            self.join()  # or it would replace this value at its end
        self.buffers[op] = clone_tensor(value.detach().to("cpu"))

    def share(self, op: int, value: Any) -> None:
        """Take the value that another step's device has; steps do not write into it."""
        self.join()
        self.buffers[op] = value

    def release(self) -> None:
        """Let go of all values."""
        self.buffers.clear()

    def hand_over(self, value: Any) -> Any:
        """The value itself: CPU tensors are complete when they are there."""
        return value

    def synchronize(self) -> None:
        """Wait for the step in flight."""
        self.join()


class HostClock:
    """When ops and transfers of one CPU device ran; has what is needed of a `DeviceClock`."""

    def __init__(self) -> None:
        self._records: list[tuple[str, int, int]] = []

    def stamp(self, kind: str, what: int = -1) -> None:
        """Note the time: `begin`, `op`, `wait`, `send` or `sent`."""
        self._records.append((kind, what, time.perf_counter_ns()))

    def note_op(self, record: tuple[int, int, int]) -> None:
        """Note (op, start, finish)."""
        op, start, finish = record
        self._records += [("wait", -1, start), ("op", op, finish)]

    def records(self) -> list[tuple[str, int, int]]:
        """(kind, what, ns) in the order they were noted."""
        return self._records


class HostCrew:
    """The CPU devices of a plan, a thread each.

    In a step, a thread waits for a tensor of a GPU by looking at its flag in host memory, and
    writes what a GPU needs into a buffer there. It does both in the order of its instructions, so
    that what it sent is sent when it begins to wait, as `joined_before` asks of a device.

    A buffer is written once a step and its reader has a step to read it: the caller must `join`
    before it launches the next step on the GPUs, and give `start` events after which they do not
    read the last step's buffers.

    Args:
        schedule: What every device does.
        hosts: The CPU devices, by index.
        board: Buffers and flags of transfers from and to GPUs.
        routes: Way of every transfer.
        seed: Seed of the random ops (of which there are none on CPU devices).
        limit_ns: How long a tensor may be waited for.

    Attributes:
        failure: What ended the last step, if it failed.
        has_results: Whether any result that replaces nothing is found on a CPU device.
    """

    def __init__(
        self,
        schedule: Schedule,
        hosts: Mapping[int, HostDevice],
        board: PinnedBoard,
        routes: Sequence[Route],
        seed: int,
        limit_ns: int,
    ) -> None:
        self.schedule = schedule
        self.board = board
        self.routes = routes
        self.limit_ns = limit_ns
        self.seed = seed
        self.failure: BaseException | None = None
        self._hosts = hosts
        self._codes = {index: generate(schedule, index) for index in hosts}
        self._timed_codes: dict[int, DeviceCode] = {}
        self._running: list[_HostStep] = []
        self._results: dict[int, Any] = {}
        places = [k for index in hosts for k, _ in schedule.results[index]]
        self.has_results = any(schedule.graph.results[k].replaces < 0 for k in places)
        self._lock = threading.Lock()
        self.mailbox = Mailbox(schedule.transfers, clone_tensor)
        share = max(1, torch.get_num_threads() // max(1, len(hosts)))
        names = [f"devplace {schedule.device_names[index]}" for index in hosts]
        self._workers = Workers(names, share)
        for host in hosts.values():
            host.join = self.join

    def start(
        self,
        number: int,
        epoch: int,
        after: Sequence[Any] = (),
        clocks: Mapping[int, Any] | None = None,
    ) -> None:
        """Begin a step; the last one must be joined.

        Args:
            number: 1-based number of the step.
            epoch: Steps begun since the flags were new, this one included.
            after: CUDA events to wait for first.
            clocks: CPU device -> its clock.
        """
        clocks = clocks or {}
        self._results = {}
        if self.mailbox.stop:  # left over from a step that was given up
            self.mailbox = Mailbox(self.schedule.transfers, clone_tensor)
        if clocks and not self._timed_codes:
            self._timed_codes = {i: generate(self.schedule, i, True) for i in self._hosts}
        for index, queue in zip(self._hosts, self._workers.queues, strict=True):
            clock = clocks.get(index)
            code = self._codes[index] if clock is None else self._timed_codes[index]
            sources = [self._hosts[index].buffers[op] for op in code.sources]
            step = _HostStep(self, index, code, sources, number, epoch, after, clock)
            self._running.append(step)
            queue.put(step.run)

    def join(self) -> None:
        """Wait for the step in flight, and take over its state if all of it succeeded."""
        for step in self._running:
            step.done.wait()
        done, self._running = self._running, []
        if all(step.outputs is not None for step in done):
            for step in done:
                self._take_over(step, step.outputs or [])

    def results(self) -> dict[int, Any]:
        """The last step's results on CPU devices that replace nothing; waits for them."""
        self.join()
        return self._results

    def fail(self, error: BaseException) -> None:
        """Give up the step in flight; the first error counts."""
        with self._lock:
            if self.failure is None:
                self.failure = error
        self.stop(str(error))

    def stop(self, reason: str) -> None:
        """Make all CPU devices end the step in flight; another device failed."""
        self.mailbox.abort(reason)

    def clear(self) -> None:
        """Forget a failure, for another try; nothing may be running."""
        self.failure = None

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def _take_over(self, step: _HostStep, outputs: list[Any]) -> None:
        places = self.schedule.results[step.device]
        for (result, _), value in zip(places, outputs, strict=True):
            source = self.schedule.graph.results[result].replaces
            if source < 0:
                self._results[result] = value
            else:
                self._hosts[step.device].buffers[source] = value


class _HostStep:
    """One step of one CPU device."""

    def __init__(
        self,
        crew: HostCrew,
        device: int,
        code: DeviceCode,
        sources: list[Any],
        number: int,
        epoch: int,
        after: Sequence[Any],
        clock: Any,
    ) -> None:
        self.device = device
        self.outputs: list[Any] | None = None
        self.done = threading.Event()
        self._crew = crew
        self._mailbox = crew.mailbox
        self._code = code
        self._sources = sources
        self._number = number
        self._epoch = epoch
        self._after = after
        self._clock = clock

    def run(self) -> None:
        """All instructions; an error ends the step on every device."""
        try:
            for event in self._after:
                event.synchronize()
            if self._clock is not None:
                self._clock.stamp("begin")
            found = self._compute()
            self.outputs = self._owned(found)
        except BaseException as error:
            self._give_up(error)
        finally:
            self._sources = []
            self.done.set()

    def _compute(self) -> list[Any]:
        note = None if self._clock is None else self._clock.note_op
        return self._code.function(
            self._sources,
            self._post,
            self._receive,
            self._mailbox.stop,
            self._crew.seed,
            self._number,
            None,
            note,
        )

    def _post(self, transfer: int, value: Any) -> None:
        if self._clock is not None:
            self._clock.stamp("send", transfer)
        if self._crew.routes[transfer] == "inside":
            self._mailbox.deliver(transfer, value)
            if self._clock is not None:
                self._clock.stamp("sent", transfer)
        else:
            self._crew.board.send(transfer, value, self._epoch)

    def _receive(self, transfer: int) -> Any:
        crew = self._crew
        if crew.routes[transfer] == "inside":
            return self._mailbox.receive(transfer)
        buffer = crew.board.buffers[transfer]
        if buffer.numel() == 0:
            return buffer
        if not crew.board.wait(transfer, self._epoch, crew.limit_ns, self._mailbox.stop):
            raise StoppedError if self._mailbox.stop else LateError(transfer)
        return buffer

    def _owned(self, values: list[Any]) -> list[Any]:
        """Results that stay as they are when sources and buffers get their next values."""
        schedule, board = self._crew.schedule, self._crew.board
        places = schedule.results[self.device]
        return [
            value.clone() if index in schedule.borrowed or board.holds(value) else value
            for (index, _), value in zip(places, values, strict=True)
        ]

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, StoppedError):
            self._crew.fail(self._described(error))
        # GPUs that wait for this device go on at once; the state is lost anyway.
        for kind, _, transfer in self._crew.schedule.instructions[self.device]:
            if kind == "send" and self._crew.routes[transfer] == "down":
                self._crew.board.post(transfer, self._epoch)

    def _described(self, error: BaseException) -> BaseException:
        if isinstance(error, LateError | ExecutionError):
            return error
        schedule, index = self._crew.schedule, failed_instruction(error, self._code)
        described = ExecutionError(_what_failed(schedule, self.device, index, error))
        described.__cause__ = error
        return described


def _what_failed(schedule: Schedule, device: int, index: int | None, error: BaseException) -> str:
    name = schedule.device_names[device]
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if index is None:
        return f"The step failed on {name}: {first}. Load the state and step again."
    kind, what, transfer = schedule.instructions[device][index]
    if kind == "call":
        return describe_op(schedule, device, what, error)
    tensor, src, dst, num_bytes = schedule.transfers[transfer]
    return (
        f"Transfer of tensor {schedule.graph.tensors[tensor].name!r} ({num_bytes} bytes) from "
        f"{schedule.device_names[src]} to {schedule.device_names[dst]} failed: {first}. Load the "
        "state and step again."
    )


def _nothing() -> None:
    return None
