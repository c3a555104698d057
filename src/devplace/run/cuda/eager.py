"""A step without CUDA graphs: one host thread starts every op and copy, streams keep the order.

That thread also runs the ops of CPU devices, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from devplace.run.copies import pack_tensor
from devplace.run.cuda.device import CudaDevice, empty_like_layout
from devplace.run.cuda.device_memory import MemoryMeter
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.run.cuda.host import HostDevice
from devplace.run.cuda.push import words_of
from devplace.run.cuda.random_ops import RandomOps
from devplace.run.cuda.routes import Route
from devplace.run.cuda.timestamps import Clocks, timed_transfer
from devplace.run.cuda.transient_values import lightened
from devplace.run.ranks.processes import Mail, Processes
from devplace.schedule import Schedule
from devplace.schedule.linear import Place
from devplace.schedule.write_back import DeviceWrites

AnyDevice = CudaDevice | HostDevice


class EagerRunner:
    """Runs steps op by op, for steps that no CUDA graph can hold, and to learn layouts.

    Args:
        schedule: What every device does.
        devices: The devices that do something, by index: GPUs, and CPU devices beside them.
        random: Their random ops.
        order: All instructions, of `linear_order`.
        writes: How each device replaces its sources.
        routes: Way of every transfer.
        processes: Those of the other devices, if there are any.
    """

    mode = "eager"

    def __init__(
        self,
        schedule: Schedule,
        devices: Mapping[int, AnyDevice],
        random: Mapping[int, RandomOps],
        order: list[Place],
        writes: tuple[DeviceWrites, ...],
        routes: Sequence[Route],
        processes: Processes | None = None,
    ) -> None:
        self._schedule = schedule
        self._processes = processes
        self._devices = devices
        self._random = random
        self._order = order
        self._writes = writes
        self._routes = routes
        self.layouts: dict[int, Any] = {}
        self.strides: dict[Any, tuple[int, ...]] = {}
        self.reserved_peak_bytes: dict[int, int] = {}

    def run(self, number: int, clocks: Clocks | None = None) -> dict[int, Any]:
        """Run a step and take over its state; gives the results that replace nothing."""
        kept = self._compute(number, clocks or {}, is_trial=False)
        return {
            result: self._devices[index].hand_over(value)
            for index, found in kept.items()
            for result, value in found
        }

    def rehearse(self, number: int) -> dict[int, int]:
        """Run a step, leave the state as it is, and learn layouts (`layouts`, `strides`).

        It needs the memory of a step and of the gaps between its tensors.

        Returns:
            Device -> most bytes that it allocated at once, apart from received tensors and from
            what stays (work buffers of libraries), in blocks above 1 MiB.
        """
        meters = {
            index: MemoryMeter(device)
            for index, device in self._devices.items()
            if isinstance(device, CudaDevice)
        }
        self._compute(number, {}, is_trial=True, meters=meters)
        peaks = {index: meter.peak_bytes() for index, meter in meters.items()}
        self.reserved_peak_bytes = {i: meter.reserved_peak_bytes for i, meter in meters.items()}
        return peaks

    def rehearse_lightly(self, number: int) -> None:
        """As `rehearse`, in about the memory that the largest op needs."""
        self._compute(number, {}, is_trial=True, is_light=True)

    def _compute(
        self,
        number: int,
        clocks: Clocks,
        is_trial: bool,
        meters: Mapping[int, MemoryMeter] | None = None,
        is_light: bool = False,
    ) -> dict[int, list[tuple[int, Any]]]:
        carrier = _Copies(
            self._schedule, self._devices, self._routes, self.layouts, clocks, meters or {}
        )
        carrier.is_light = is_light
        carrier.mail = None if self._processes is None else Mail(self._processes)
        passes = {}
        for index, device in self._devices.items():
            random = self._random[index]
            random.start_step(number)
            with device.current():
                passes[index] = DevicePass(
                    self._schedule,
                    index,
                    device.torch_device,
                    device.buffers,
                    carrier,
                    random,
                    StateWrites(
                        self._writes[index],
                        is_trial,
                        self.strides,
                        is_light and isinstance(device, CudaDevice),
                    ),
                    clocks.get(index),
                )
        for index, some in groupby(self._order, key=itemgetter(0)):
            with self._devices[index].current():
                for _, instruction in some:
                    passes[index].run(instruction)
        results = {}
        for index, device in self._devices.items():
            with device.current():
                results[index] = passes[index].finish()
        return results

    def failed_transfer(self) -> int | None:
        """Copies by stream order always come."""
        return None

    def host_failure(self) -> BaseException | None:
        """Failures of ops are raised at once."""
        return None

    def close(self) -> None:
        """Nothing is held."""


class _Copies:
    """Copies made when they are sent; torch orders them among the two main streams.

    Attributes:
        is_light: Whether GPUs keep descriptions of large tensors only.
        mail: To and from other processes.
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Mapping[int, AnyDevice],
        routes: Sequence[Route],
        layouts: dict[int, Any],
        clocks: Clocks,
        meters: Mapping[int, MemoryMeter],
    ) -> None:
        self._schedule = schedule
        self._devices = devices
        self._routes = routes
        self._layouts = layouts
        self._clocks = clocks
        self._meters = meters
        self.is_light = False
        self.mail: Mail | None = None
        self._arrived: dict[int, Any] = {}

    def send(self, transfer: int, value: Any) -> None:
        if self.mail is not None:
            dense = pack_tensor(value)
            self._layouts.setdefault(transfer, empty_like_layout(dense, "meta"))
            self.mail.send(transfer, dense)
            return
        receiver = self._devices[self._schedule.transfers[transfer].dst]
        sender = self._devices[self._schedule.transfers[transfer].src]
        if _lies_on_host(value, sender) and isinstance(receiver, CudaDevice):
            self._layouts.setdefault(transfer, empty_like_layout(value, "meta"))
            self._arrived[transfer] = value
            return
        dense = pack_tensor(value)
        with receiver.current():
            buffer = self._buffer(dense, receiver)
            with sender.current(), timed_transfer(self._clocks.get(sender.index), transfer):
                words = words_of(dense)
                if self._routes[transfer] == "staged":
                    words = words.cpu()  # the direct link may be faulty
                is_direct = self._routes[transfer] == "peer"
                words_of(buffer).copy_(words, non_blocking=is_direct)
        self._layouts.setdefault(transfer, empty_like_layout(buffer, "meta"))
        is_light = self.is_light and isinstance(receiver, CudaDevice)
        self._arrived[transfer] = lightened(buffer) if is_light else buffer

    def _buffer(self, dense: Any, receiver: AnyDevice) -> Any:
        meter = self._meters.get(receiver.index)
        if meter is None:
            return empty_like_layout(dense, receiver.torch_device)
        with meter.keeping_received():
            buffer = empty_like_layout(dense, receiver.torch_device)
        meter.received.append(buffer)
        return buffer

    def receive(self, transfer: int) -> Any:
        if self.mail is None:
            return self._arrived.pop(transfer)
        value, was_on_gpu = self.mail.receive(transfer)
        self._layouts.setdefault(transfer, empty_like_layout(value, "meta"))
        if not was_on_gpu:
            return value
        receiver = self._devices[self._schedule.transfers[transfer].dst]
        buffer = self._buffer(value, receiver)
        buffer.copy_(value)
        return lightened(buffer) if self.is_light else buffer

    def join(self, transfer: int) -> None:
        """The sender's own stream makes the copies."""

    def finish(self) -> None:
        """As `join`."""

    def flush(self) -> bool:
        return True  # the stream may wait for a copy


def _lies_on_host(value: Any, sender: AnyDevice) -> bool:
    """Whether a GPU's op left a tensor in host memory, from which its readers take it too.

    Attention with dropout does so with its seed and offset, but not while a graph is captured.
    A reader follows their addresses on the host, so a copy on a GPU would crash the process.
    """
    return isinstance(sender, CudaDevice) and value.device.type == "cpu"
