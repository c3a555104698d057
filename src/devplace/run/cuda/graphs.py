"""Run a step as one CUDA graph per GPU, each launched by its own host thread."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from devplace.errors import ExecutionError
from devplace.run.cuda.arena import Arena, choose_arenas, copied_bytes, step_peaks
from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.device_memory import (
    allowed_bytes,
    max_allocated_bytes,
    pool_memory,
    reserve_arena,
)
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.run.cuda.expandable import expandable_segments
from devplace.run.cuda.failures import forget_frames, is_out_of_memory
from devplace.run.cuda.host import HostCrew, LateError
from devplace.run.cuda.nccl_channels import NcclChannels
from devplace.run.cuda.peer_channels import PeerChannels
from devplace.run.cuda.random_ops import RandomOps
from devplace.run.cuda.timeouts import first_cause
from devplace.run.cuda.timestamps import Clock, Clocks
from devplace.run.workers import Workers
from devplace.schedule import DeviceWrites, PushJoins


@dataclass
class _Recorded:
    """A step as CUDA graphs.

    Attributes:
        graphs: Device -> its graph.
        kept: Results that replace nothing -> (device, value in the graph's memory).
    """

    graphs: dict[int, Any] = field(default_factory=dict)
    kept: dict[int, tuple[int, Any]] = field(default_factory=dict)


class GraphRunner:
    """Captures a step and replays it.

    A launch blocks its host thread while the device's queue is full, and a device may spin on
    another one whose graph is not launched yet; so every device is launched by its own thread.

    Args:
        mailroom: Receive buffers and flags.
        devices: The GPUs that do something, by index.
        random: Their random ops.
        writes: How each device replaces its sources.
        strides: Of `StateWrites`.
        arena_bytes: Device -> memory its step will need at once; asked for in one piece, so that
            little is lost between pieces. Where it is not known, what the tensors take is.

    Attributes:
        crew: The CPU devices beside them, if any do something; set before the first step.

    Raises:
        RuntimeError: The step cannot be captured.
    """

    mode = "graph"

    def __init__(
        self,
        mailroom: PeerChannels | NcclChannels,
        devices: Mapping[int, CudaDevice],
        random: Mapping[int, RandomOps],
        writes: tuple[DeviceWrites, ...],
        strides: dict[Any, tuple[int, ...]],
        arena_bytes: Mapping[int, int],
    ) -> None:
        self._mailroom = mailroom
        self.crew: HostCrew | None = None
        self._epoch = 0
        self._last: list[Any] = []
        self._devices = devices
        self._random = random
        self._writes = writes
        self._strides = strides
        self._arena_bytes = arena_bytes
        self.step_peak_bytes: dict[int, int] = {}
        self._joins = PushJoins.of(mailroom.schedule)
        self._ends = {index: torch.cuda.Event() for index in devices}
        self._plain = self._capture_all({})
        names = mailroom.schedule.device_names
        self._workers = Workers([f"devplace {names[index]}" for index in devices])

    def run(self, number: int, clocks: Clocks | None = None) -> dict[int, Any]:
        """Launch a step; gives the results that replace nothing, not waited for.

        Args:
            number: 1-based number of the step.
            clocks: Take the time of this step; it is captured anew for that.
        """
        step = self._plain if clocks is None else self._capture_all(clocks)
        self._start_crew(number, clocks)
        launched: SimpleQueue[BaseException | None] = SimpleQueue()
        for queue, device in zip(self._workers.queues, self._devices.values(), strict=True):
            queue.put(self._make_job(step.graphs[device.index], device, number, launched))
        errors = [launched.get() for _ in self._devices]
        for error in errors:
            if error is not None:
                if self.crew is not None:
                    self.crew.stop(str(error))
                raise error
        # Memory may only be asked for once every device is launched: that can wait for a device.
        for index, device in self._devices.items():
            with device.current():
                self._ends[index].record(device.main)
        if self.crew is not None:
            self._last = [_end_of(device) for device in self._devices.values()]
        results = {result: self._copied(*found) for result, found in step.kept.items()}
        if self.crew is not None and self.crew.has_results:
            results.update(self.crew.results())
        if clocks is not None:
            self.synchronize()  # its graphs are freed
        return results

    def _start_crew(self, number: int, clocks: Clocks | None) -> None:
        """Begin the step on the CPU devices: GPUs must not write what these still read."""
        self._epoch += 1
        if self.crew is not None:
            self.crew.join()
            self.crew.start(number, self._epoch, self._last, clocks)

    def synchronize(self) -> None:
        """Wait for all devices."""
        if self.crew is not None:
            self.crew.join()
        for device in self._devices.values():
            device.synchronize()

    def pool_bytes(self, index: int) -> tuple[int, int]:
        """(reserved, in use) by the pool of a device's graph, bytes."""
        return pool_memory(self._devices[index], self._plain.graphs[index].pool())

    def failed_transfer(self) -> int | None:
        """A transfer that was not there in time in a step that has ended; resets the flags."""
        if not self._late():
            return None
        self.synchronize()  # what made it late may have given up only now
        found = self._late()
        self._reset()
        return first_cause(self._mailroom.schedule, found)

    def _late(self) -> list[int]:
        """Transfers that were not there in time, as far as that is known."""
        late = [flags.late_transfer() for flags in self._mailroom.flags.values()]
        if self.crew is not None and isinstance(self.crew.failure, LateError):
            late.append(self.crew.failure.transfer)
        return [transfer for transfer in late if transfer is not None]

    def host_failure(self) -> BaseException | None:
        """What ended the last step on a CPU device, if not a late tensor; resets the flags."""
        failure = self.crew.failure if self.crew is not None else None
        if failure is None or isinstance(failure, LateError):
            return None
        self._reset()
        return failure

    def _reset(self) -> None:
        self.synchronize()
        self._mailroom.reset()
        self._epoch = 0
        if self.crew is not None:
            self.crew.clear()
        for device in self._devices.values():
            torch.cuda.synchronize(device.torch_device)

    def close(self) -> None:
        """End the threads and free the graphs."""
        if self.crew is not None:
            self.crew.stop("the step was closed")
            self.crew.join()
            self.crew.close()
        self._workers.close()
        self._plain.kept.clear()  # memory of a graph's pool is given back once all of it is free
        self._plain.graphs.clear()

    def _make_job(self, graph: Any, device: CudaDevice, number: int, launched: Any) -> Any:
        def job() -> None:
            try:
                self._launch(graph, device, number)
            except BaseException as error:
                launched.put(error)
            else:
                launched.put(None)

        return job

    def _launch(self, graph: Any, device: CudaDevice, number: int) -> None:
        flags = self._mailroom.flags[device.index]
        with device.current():
            for index, end in self._ends.items():
                if index != device.index:
                    device.main.wait_event(end)  # their last step may still read and signal here
            self._random[device.index].start_step(number)
            graph.replay()
            flags.host_error.copy_(flags.error, non_blocking=True)

    def _copied(self, index: int, value: Any) -> Any:
        device = self._devices[index]
        with device.current():
            copied = value.clone()
        return device.hand_over(copied)

    def _capture_all(self, clocks: Mapping[int, Clock]) -> _Recorded:
        gc.collect()
        torch.cuda.empty_cache()  # while a capture is on, nothing cached can be given back
        step = _Recorded()
        for index, device in self._devices.items():
            step.graphs[index] = self._capture_somehow(device, step, clocks.get(index))
        return step

    def _capture_somehow(self, device: CudaDevice, step: _Recorded, clock: Clock | None) -> Any:
        """Capture with one arena after the other until one does."""
        arenas = self._arenas_of(device)
        for arena in arenas[:-1]:
            try:
                return self._capture(device, step, clock, arena)
            except (RuntimeError, ExecutionError) as error:
                if not is_out_of_memory(error):
                    raise
                forget_frames(error)
            gc.collect()
            torch.cuda.empty_cache()
        return self._capture(device, step, clock, arenas[-1])

    def _capture(
        self, device: CudaDevice, step: _Recorded, clock: Clock | None, arena: Arena
    ) -> Any:
        with device.current():  # it makes a context on the current device
            graph = torch.cuda.CUDAGraph()
        random = self._random[device.index]
        # Two captures of a step never run at once, so they may share memory.
        pool = None if clock is None else self._plain.graphs[device.index].pool()
        torch.cuda.synchronize(device.torch_device)
        with (
            expandable_segments(str(device.torch_device)),
            device.current(),
            random.capturing(graph),
        ):
            # Relaxed: a kernel met for the first time may still be loaded.
            graph.capture_begin(pool, capture_error_mode="relaxed")
            try:
                if clock is None:
                    reserve_arena(device, arena)
                self._record(device, random, step, clock)
            except BaseException:
                _end_quietly(graph)
                raise
            graph.capture_end()
        self.step_peak_bytes[device.index] = max_allocated_bytes(device)
        return graph

    def _arenas_of(self, device: CudaDevice) -> list[Arena]:
        index, schedule = device.index, self._mailroom.schedule
        peaks = step_peaks(schedule, index, self._writes[index], self._joins)
        small = peaks.small + copied_bytes(schedule, index)
        large = max(self._arena_bytes.get(index, 0), peaks.large)
        return choose_arenas(large, small, allowed_bytes(device))

    def _record(
        self, device: CudaDevice, random: RandomOps, step: _Recorded, clock: Clock | None
    ) -> None:
        schedule = self._mailroom.schedule
        carrier = self._mailroom.carrier(device, self._joins.before_wait, clock)
        one_pass = DevicePass(
            schedule,
            device.index,
            device.torch_device,
            device.buffers,
            carrier,
            random,
            StateWrites(self._writes[device.index], strides=self._strides),
            clock,
            self._joins.when_over[device.index],
        )
        carrier.begin()
        self._mailroom.flags[device.index].epoch.add_(1)
        for index in range(len(schedule.instructions[device.index])):
            one_pass.run(index)
        kept = carrier.share_results(dict(one_pass.finish()))
        step.kept.update((result, (device.index, value)) for result, value in kept.items())


def _end_of(device: CudaDevice) -> Any:
    """An event at the end of all work so far, that a host thread can wait for without spinning."""
    with device.current():
        return device.main.record_event(torch.cuda.Event(blocking=True))


def _end_quietly(graph: Any) -> None:
    """End a capture that failed; what made it fail is told instead."""
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")  # that it is empty
        graph.capture_end()
