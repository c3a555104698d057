"""The executor for logical CPU devices: one thread each, with real copies between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from devplace.errors import ExecutionError, RankError
from devplace.run.codegen import DeviceCode, StoppedError, failed_instruction, generate
from devplace.run.copies import clone_tensor
from devplace.run.mailbox import CopyFunction, Mailbox, make_post
from devplace.run.measured_timeline import MeasuredTimeline, make_timeline
from devplace.run.seeds import RandomKeys
from devplace.run.workers import Workers
from devplace.schedule import Schedule, stored_sources

if TYPE_CHECKING:
    from devplace.run.ranks.processes import Processes

RETRY = "Nothing of this step was applied; correct the cause and step again."


@dataclass(frozen=True)
class StepOutcome:
    """What a step gave.

    Attributes:
        results: Value of each result that replaces no source, by index into `graph.results`.
        timeline: When everything ran, if it was asked for.
    """

    results: dict[int, Any]
    timeline: MeasuredTimeline | None = None


class CpuExecutor:
    """Runs a schedule on logical CPU devices and keeps parameters, buffers and state between steps.

    Every device is a thread that runs its instructions in order, single-threaded inside each op,
    and waits where a tensor from another device has not arrived. Small copies are made by the
    sender, large ones by a copy thread of the sender, so they overlap with its compute.

    Args:
        schedule: What every device does.
        seed: Seed of the random ops.
        copy: Makes the copy of a transferred tensor (for tests of faulty and slow links).
        keeps_old_state: Whether the values before a step are kept until it has succeeded. If not,
            they are freed after their last use (less memory), and after an error the state is lost
            until it is `put` again.
        processes: Those that run the other devices, if there are any; the schedule is then the part
            of this one.
    """

    def __init__(
        self,
        schedule: Schedule,
        seed: int = 0,
        copy: CopyFunction = clone_tensor,
        keeps_old_state: bool = True,
        processes: Processes | None = None,
    ) -> None:
        self.schedule = schedule
        self.processes = processes
        self.seed = seed
        self.put_count: dict[int, int] = {}
        self._missing = set(schedule.holders)
        self._random_keys = RandomKeys(schedule.captured)
        self._copy = copy
        self._keeps_old_state = keeps_old_state
        self._codes = self._generate(is_timed=False)
        self._timed_codes: list[DeviceCode] = []
        self._slots = [{op: k for k, op in enumerate(code.sources)} for code in self._codes]
        self._stores: list[list[Any]] = [[None] * len(code.sources) for code in self._codes]
        self._generators = [torch.Generator() for _ in self._codes]
        self._mailbox = Mailbox(schedule.transfers, copy)
        names = [f"devplace {name}" for name in schedule.device_names]
        self._workers = Workers(names + [f"{name} copies" for name in names])

    def put(self, op: int, value: Any) -> None:
        """Give a source op its value: a copy on every device that holds it.

        Args:
            op: Index of the source op.
            value: Its tensor, on any torch device.
        """
        for device in self.schedule.holders.get(op, ()):
            copied = clone_tensor(value.detach().to("cpu"))
            self._stores[device][self._slots[device][op]] = copied
            self.put_count[op] = self.put_count.get(op, 0) + 1
        self._missing.discard(op)

    def get(self, op: int) -> Any:
        """The present value of a source op, as held on its home; not a copy."""
        holders = self.schedule.holders[op]
        home = self.schedule.device_of_op[op]
        device = home if home in holders else holders[0]
        return self._stores[device][self._slots[device][op]]

    def take(self, other: CpuExecutor, ops: Mapping[int, int]) -> None:
        """Take over values of sources; only what a device did not hold there is copied. The other
        then lacks those that steps replace.

        Args:
            other: What runs another shape of the step, on the same devices.
            ops: Source op here -> source op there.
        """
        for mine, theirs in ops.items():
            value = other.get(theirs)
            for device in self.schedule.holders.get(mine, ()):
                slot = other._slots[device].get(theirs)
                held = clone_tensor(value) if slot is None else other._stores[device][slot]
                self._stores[device][self._slots[device][mine]] = held
            self._missing.discard(mine)
        for op in set(ops.values()) & set(other.schedule.graph.replaced):
            for store, slots in zip(other._stores, other._slots, strict=True):
                if op in slots:
                    store[slots[op]] = None
            other._missing.add(op)

    def step(self, number: int, is_timed: bool = False) -> StepOutcome:
        """Run one step on the values put, and keep what it leaves behind for the next.

        Args:
            number: 1-based number of the step; with the seed it fixes all random numbers.
            is_timed: Whether to measure the timeline (about 0.3 us more per op).

        Raises:
            ExecutionError: An op or a copy failed; the state is as before the step.
        """
        if is_timed and not self._timed_codes:
            self._timed_codes = self._generate(is_timed=True)
        codes = self._timed_codes if is_timed else self._codes
        if self._workers.is_closed:
            raise ExecutionError("A closed step cannot run: its threads have ended. Compile again.")
        for op, key in self._random_keys.of_step(self.seed, number).items():
            self.put(op, key)
        self._check_complete()
        transfers = self.schedule.transfers
        if self._mailbox.stop:  # left over from a step that was given up
            self._mailbox = Mailbox(transfers, self._copy)
        self._mailbox.times = [(0, 0)] * len(transfers) if is_timed else None
        run = _StepRun(self, codes, number)
        begin_ns = time.perf_counter_ns()
        outputs = run.run()
        end_ns = time.perf_counter_ns()
        times = self._mailbox.times
        results = self._commit(outputs)
        if self.processes is not None:
            results = self.processes.share_results(results)
        if times is None:
            return StepOutcome(results)
        num_ops = len(self.schedule.graph.ops)
        return StepOutcome(results, make_timeline(num_ops, run.records, times, begin_ns, end_ns))

    @property
    def has_lost_state(self) -> bool:
        """Whether a failure has cost parameters or state, so that they must be put again."""
        return bool(self._missing & stored_sources(self.schedule))

    def close(self) -> None:
        """End the threads; the executor cannot step any more."""
        self._workers.close()

    def _check_complete(self) -> None:
        if self._missing:
            name = self.schedule.graph.ops[min(self._missing)].name
            raise ExecutionError(
                f"Every source needs a value before a step: {name!r} and "
                f"{len(self._missing) - 1} others have none. Load the state again."
            )

    def _generate(self, is_timed: bool) -> list[DeviceCode]:
        devices = range(len(self.schedule.device_names))
        return [generate(self.schedule, device, is_timed) for device in devices]

    def _commit(self, outputs: list[list[Any]]) -> dict[int, Any]:
        graph, kept = self.schedule.graph, {}
        for device, values in enumerate(outputs):
            places = self.schedule.results[device]
            for (index, _), value in zip(places, values, strict=True):
                owned = value.clone() if index in self.schedule.borrowed else value
                source = graph.results[index].replaces
                if source >= 0:
                    self._stores[device][self._slots[device][source]] = owned
                    self._missing.discard(source)
                else:
                    kept[index] = owned
        return kept

    def _take_sources(self, device: int) -> list[Any]:
        """The list a device's function empties as it goes; a copy of the list keeps the values."""
        store = self._stores[device]
        if self._keeps_old_state:
            return list(store)
        graph, slots = self.schedule.graph, self._slots[device]
        taken = list(store)
        for op in graph.replaced:
            if op in slots:
                self._missing.add(op)
                store[slots[op]] = None
        return taken


class _StepRun:
    """One step in flight."""

    def __init__(self, executor: CpuExecutor, codes: list[DeviceCode], number: int) -> None:
        self.records: list[tuple[int, int, int]] = []
        self._executor = executor
        self._codes = codes
        self._number = number
        self._outputs: list[list[Any]] = [[] for _ in codes]
        self._mailbox = executor._mailbox
        self._finished = [False] * len(codes)
        self._failure: tuple[BaseException, str] | None = None
        self._lock = threading.Lock()

    def run(self) -> list[list[Any]]:
        started: list[int] = []
        done: SimpleQueue[int] = SimpleQueue()
        try:
            for device in range(len(self._codes)):
                self._executor._workers.queues[device].put(self._make_job(device, done))
                started.append(device)
            if self._executor.processes is None:
                for _ in started:
                    done.get()
            else:
                self._run_with(self._executor.processes, started, done)
        except BaseException as error:  # the user's interrupt: end the step before it goes on
            self._fail(error, "The step was interrupted.")
            while not all(self._finished[device] for device in started):
                time.sleep(0.001)  # a token of `done` may have been lost in the interrupt
            raise
        if self._failure is not None:
            cause, message = self._failure
            if isinstance(cause, RankError):
                raise cause
            raise ExecutionError(message) from cause
        return self._outputs

    def _run_with(self, processes: Processes, devices: list[int], done: SimpleQueue[int]) -> None:
        """As the devices run, exchange tensors with other processes, and watch these."""

        def carry() -> None:
            try:
                processes.carry_step(self._mailbox)
            except StoppedError:
                pass
            except BaseException as error:
                self._fail(error, str(error))
            finally:
                done.put(-1)

        processes.group.submit(carry)
        try:
            left = {*devices, -1}
            # After a failure what carries messages may wait for a process that is gone.
            while left and not (self._failure and left == {-1}):
                left.discard(processes.group.take(done))
        except RankError as error:
            self._fail(error, str(error))
            while not all(self._finished[device] for device in devices):
                time.sleep(0.001)

    def _make_job(self, device: int, done: SimpleQueue[int]) -> Any:
        sources = self._executor._take_sources(device)
        executor, code, mailbox = self._executor, self._codes[device], self._mailbox
        queue = executor._workers.queues[len(self._codes) + device]
        post = make_post(mailbox, executor.schedule.transfers, queue, self._copy_failed)
        generator = executor._generators[device]

        def job() -> None:
            try:
                self._outputs[device] = code.function(
                    sources,
                    post,
                    mailbox.receive,
                    mailbox.stop,
                    executor.seed,
                    self._number,
                    generator,
                    self.records.append,
                )
            except StoppedError:
                pass
            except BaseException as error:
                self._fail(error, self._describe(device, error))
            finally:
                self._finished[device] = True
                done.put(device)

        return job

    def _copy_failed(self, index: int, error: BaseException) -> None:
        self._fail(error, self._describe_transfer(index, error))

    def _fail(self, error: BaseException, message: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = (error, message)
        self._mailbox.abort(message)

    def _describe(self, device: int, error: BaseException) -> str:
        schedule = self._executor.schedule
        index = failed_instruction(error, self._codes[device])
        if index is None:
            return f"The step failed on {schedule.device_names[device]}: {_first_line(error)}"
        kind, what, transfer = schedule.instructions[device][index]
        if kind == "send":
            return self._describe_transfer(transfer, error)
        op = schedule.graph.ops[what if kind == "call" else schedule.graph.producer[what]]
        module = f"module {op.module!r}" if op.module else "the model itself"
        where = f"{module}, {op.source_line}" if op.source_line else module
        return (
            f"Op {op.name!r} ({op.target}, {op.stage}, {where}) failed on "
            f"{schedule.device_names[device]}: {_first_line(error)} {self._advice()}"
        )

    def _describe_transfer(self, index: int, error: BaseException) -> str:
        schedule = self._executor.schedule
        tensor, src, dst, num_bytes = schedule.transfers[index]
        return (
            f"Transfer of tensor {schedule.graph.tensors[tensor].name!r} ({num_bytes} bytes) from "
            f"{schedule.device_names[src]} to {schedule.device_names[dst]} failed: "
            f"{_first_line(error)} {self._advice()}"
        )

    def _advice(self) -> str:
        if self._executor._keeps_old_state:
            return RETRY
        return "The old state was not kept; load it again before the next step."


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return line if line.endswith((".", "!", "?")) else line + "."
