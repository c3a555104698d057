"""A step as one CUDA graph per GPU, each launched from a host thread of its own."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import torch

from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.device_pass import DevicePass
from devplace.run.cuda.flagged import FlagCarrier, Mailroom
from devplace.run.cuda.random import RandomOps
from devplace.run.linear import Place, joined_before
from devplace.run.workers import Workers


class GraphRunner:
    """Captures a step and replays it.

    A launch blocks its host thread while the device's queue is full, and a device may spin on
    another one whose graph is not launched yet; so every device is launched by its own thread.

    Args:
        mailroom: Receive buffers and flags.
        devices: The GPUs that do something, by index.
        random: Their random ops.
        order: All instructions, of `linear_order`.

    Raises:
        RuntimeError: The step cannot be captured.
    """

    mode = "graph"

    def __init__(
        self,
        mailroom: Mailroom,
        devices: Mapping[int, CudaDevice],
        random: Mapping[int, RandomOps],
        order: list[Place],
    ) -> None:
        self._mailroom = mailroom
        self._devices = devices
        self._random = random
        self._joins = joined_before(mailroom.schedule, order)
        self._kept: dict[int, tuple[int, Any]] = {}
        self._ends = {index: torch.cuda.Event() for index in devices}
        gc.collect()
        self._graphs = {index: self._capture(device) for index, device in devices.items()}
        names = mailroom.schedule.device_names
        self._workers = Workers([f"devplace {names[index]}" for index in devices])

    def run(self, number: int) -> dict[int, Any]:
        """Launch a step; gives the results that replace nothing, not waited for."""
        launched: SimpleQueue[BaseException | None] = SimpleQueue()
        for queue, device in zip(self._workers.queues, self._devices.values(), strict=True):
            queue.put(self._make_job(device, number, launched))
        errors = [launched.get() for _ in self._devices]
        for error in errors:
            if error is not None:
                raise error
        # Memory may only be asked for once every device is launched: that can wait for a device.
        for index, device in self._devices.items():
            device.main.record_event(self._ends[index])
        return {result: self._copied(*found) for result, found in self._kept.items()}

    def failed_transfer(self) -> int | None:
        """A transfer that was not there in time in a step that has ended; resets the flags."""
        for flags in self._mailroom.flags.values():
            code = int(flags.host_error)
            if code:
                for device in self._devices.values():
                    torch.cuda.synchronize(device.torch_device)
                self._mailroom.reset()
                return code - 1
        return None

    def close(self) -> None:
        """End the threads and free the graphs."""
        self._workers.close()
        self._graphs.clear()

    def _make_job(self, device: CudaDevice, number: int, launched: Any) -> Any:
        def job() -> None:
            try:
                self._launch(device, number)
            except BaseException as error:
                launched.put(error)
            else:
                launched.put(None)

        return job

    def _launch(self, device: CudaDevice, number: int) -> None:
        flags = self._mailroom.flags[device.index]
        with device.current():
            for index, end in self._ends.items():
                if index != device.index:
                    device.main.wait_event(end)  # their last step may still read and signal here
            self._random[device.index].start_step(number)
            self._graphs[device.index].replay()
            flags.host_error.copy_(flags.error, non_blocking=True)

    def _copied(self, index: int, value: Any) -> Any:
        device = self._devices[index]
        with device.current():
            copied = value.clone()
        return device.hand_over(copied)

    def _capture(self, device: CudaDevice) -> Any:
        graph = torch.cuda.CUDAGraph()
        random = self._random[device.index]
        torch.cuda.synchronize(device.torch_device)
        with device.current(), random.capturing(graph):
            # Relaxed: a kernel met for the first time may still be loaded.
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                self._record(device, random)
            except BaseException:
                _end_quietly(graph)
                raise
            graph.capture_end()
        return graph

    def _record(self, device: CudaDevice, random: RandomOps) -> None:
        schedule = self._mailroom.schedule
        carrier = FlagCarrier(self._mailroom, device, self._joins)
        one_pass = DevicePass(
            schedule, device.index, device.torch_device, device.buffers, carrier, random
        )
        self._mailroom.flags[device.index].epoch.add_(1)
        for index in range(len(schedule.instructions[device.index])):
            one_pass.run(index)
        carrier.finish()
        self._write_back(device, one_pass.results())

    def _write_back(self, device: CudaDevice, results: list[tuple[int, Any]]) -> None:
        """New parameters and state into the buffers the next step starts from."""
        replaced, values = [], []
        for result, value in results:
            source = self._mailroom.schedule.graph.results[result].replaces
            if source < 0:
                self._kept[result] = (device.index, value)
            elif device.buffers[source] is not value:
                replaced.append(device.buffers[source])
                values.append(value)
        if replaced:
            torch._foreach_copy_(replaced, values)


def _end_quietly(graph: Any) -> None:
    """End a capture that failed; what made it fail is told instead."""
    try:
        graph.capture_end()
    except RuntimeError:
        return
