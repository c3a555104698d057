"""Runs a schedule on CUDA devices."""

from __future__ import annotations

from typing import Any

import torch

from devplace.errors import ExecutionError, InputError
from devplace.run.cpu import StepOutcome
from devplace.run.cuda.clock import collect, make_clocks, offset_ns
from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.eager import EagerRunner
from devplace.run.cuda.flagged import Mailroom
from devplace.run.cuda.graphs import GraphRunner
from devplace.run.cuda.push import Push, push
from devplace.run.cuda.random import RandomOps
from devplace.run.linear import linear_order
from devplace.run.schedule import Schedule


class CudaExecutor:
    """Runs a schedule on CUDA devices and keeps parameters, buffers and state between steps.

    Every device's ops are captured once, in plan order, into a CUDA graph of its own. Tensors are
    pushed into fixed buffers of their receivers, which wait for them on the device. A step that
    cannot be captured runs op by op. Devices of the schedule that run nothing are not touched.

    Args:
        schedule: What every device does; its device names are torch device names.
        seed: Seed of the random ops.
        waits: Whether `step` waits for its end. If not, a failure shows in a later call.
        wait_limit_s: How long a device may wait for a tensor, s.
        uses_graphs: Whether CUDA graphs are tried at all.
        push: Carries a tensor to another GPU (for tests of faulty links).

    Raises:
        InputError: Ops on a device that is no CUDA device, is missing, or is listed twice.
    """

    def __init__(
        self,
        schedule: Schedule,
        seed: int = 0,
        *,
        waits: bool = True,
        wait_limit_s: float = 10.0,
        uses_graphs: bool = True,
        push: Push = push,
    ) -> None:
        self.schedule = schedule
        self.seed = seed
        self.put_count: dict[int, int] = {}
        self.reason = "" if uses_graphs else "graphs are switched off"
        self._waits = waits
        self._wait_limit_s = wait_limit_s
        self._push = push
        self._number = 0
        self._is_closed = False
        self._missing = set(schedule.holders)
        active = [index for index, some in enumerate(schedule.instructions) if some]
        _check_devices([schedule.device_names[index] for index in active])
        self._devices = {index: CudaDevice(index, schedule.device_names[index]) for index in active}
        self._idle: dict[int, Any] = {}
        self._random = self._make_random()
        self._order = linear_order(schedule)
        self._runner: EagerRunner | GraphRunner | None = None

    @property
    def mode(self) -> str:
        """`graph`, `eager`, or empty before the first step; `reason` says why not `graph`."""
        return self._runner.mode if self._runner is not None else ""

    def put(self, op: int, value: Any) -> None:
        """Give a source op its value: a copy on every device that holds it.

        Args:
            op: Index of the source op.
            value: Its tensor, on any torch device.
        """
        for index in self.schedule.holders[op]:
            if index in self._devices:
                self._devices[index].put(op, value)
            else:
                self._idle[op] = value.detach().clone()
            self.put_count[op] = self.put_count.get(op, 0) + 1
        self._missing.discard(op)

    def get(self, op: int) -> Any:
        """The present value of a source op, as held on its home; not a copy."""
        holders = self.schedule.holders[op]
        home = self.schedule.device_of_op[op]
        index = home if home in holders else holders[0]
        if index not in self._devices:
            return self._idle[op]
        self._devices[index].synchronize()
        self._raise_failure()
        return self._devices[index].buffers[op]

    def step(self, number: int, is_timed: bool = False) -> StepOutcome:
        """Run one step on the values put, and keep what it leaves behind for the next.

        Args:
            number: 1-based number of the step; with the seed it fixes all random numbers.
            is_timed: Whether to measure the timeline (1-2 us more per op, and a new capture).

        Raises:
            ExecutionError: An op failed or a tensor did not come; the state must be put again.
        """
        if self._is_closed:
            raise ExecutionError("A closed step cannot run: its graphs are gone. Compile again.")
        self._raise_failure()
        self._check_complete()
        self._number = number
        with torch.no_grad():
            try:
                if self._runner is None:
                    self._runner = self._make_runner(number)
                outcome = self._run_timed(number) if is_timed else self._run(number)
            except RuntimeError as error:
                self._lose_state()
                raise ExecutionError(
                    f"Step {number} failed: {str(error).splitlines()[0]}. The state is lost; load "
                    "it again."
                ) from error
        return outcome

    def _run(self, number: int) -> StepOutcome:
        assert self._runner is not None
        outcome = StepOutcome(self._runner.run(number))
        if self._waits:
            self.synchronize()
        return outcome

    def _run_timed(self, number: int) -> StepOutcome:
        assert self._runner is not None
        clocks = make_clocks(self.schedule, self._devices)
        offsets = {index: offset_ns(device) for index, device in self._devices.items()}
        results = self._runner.run(number, clocks)
        self.synchronize()
        return StepOutcome(results, collect(self.schedule, clocks, offsets))

    def synchronize(self) -> None:
        """Wait for all steps.

        Raises:
            ExecutionError: A tensor did not come in time.
        """
        for device in self._devices.values():
            device.synchronize()
        self._raise_failure()

    def close(self) -> None:
        """Free graphs and threads; the executor cannot step any more."""
        for device in self._devices.values():
            device.synchronize()
        self._is_closed = True
        if self._runner is not None:
            self._runner.close()

    def _make_random(self) -> dict[int, RandomOps]:
        names = self.schedule.graph.program.random_ops
        random = {}
        for index, device in self._devices.items():
            used = {node.name for _, node, _ in self.schedule.instructions[index]}
            random[index] = RandomOps(names, used, device.torch_device, self.seed)
        return random

    def _make_runner(self, number: int) -> EagerRunner | GraphRunner:
        """A step without graphs first: it warms libraries up and shows how tensors are laid out."""
        eager = EagerRunner(self.schedule, self._devices, self._random, self._order)
        if self.reason:
            return eager
        if not self._have_peer_access():
            self.reason = "no peer access between the devices"
            return eager
        eager.compute(number, {})
        for device in self._devices.values():
            device.synchronize()
        torch.cuda.empty_cache()
        try:
            mailroom = Mailroom(
                self.schedule, self._devices, eager.layouts, self._push, self._wait_limit_s
            )
            return GraphRunner(mailroom, self._devices, self._random, self._order)
        except torch.OutOfMemoryError:
            raise
        except (ExecutionError, RuntimeError, ImportError) as error:
            self.reason = f"the step cannot be captured: {str(error).splitlines()[0]}"
            self._random = self._make_random()
            return EagerRunner(self.schedule, self._devices, self._random, self._order)

    def _have_peer_access(self) -> bool:
        devices = {index: device.torch_device for index, device in self._devices.items()}
        return all(
            torch.cuda.can_device_access_peer(devices[transfer.src], devices[transfer.dst])
            for transfer in self.schedule.transfers
        )

    def _check_complete(self) -> None:
        if self._missing:
            name = self.schedule.graph.ops[min(self._missing)].name
            raise ExecutionError(
                f"Every source needs a value before a step: {name!r} and "
                f"{len(self._missing) - 1} others have none. Load the state again."
            )

    def _raise_failure(self) -> None:
        failed = self._runner.failed_transfer() if self._runner is not None else None
        if failed is None:
            return
        self._lose_state()
        schedule = self.schedule
        tensor, src, dst, num_bytes = schedule.transfers[failed]
        raise ExecutionError(
            f"Transfer of tensor {schedule.graph.tensors[tensor].name!r} ({num_bytes} bytes) from "
            f"{schedule.device_names[src]} to {schedule.device_names[dst]} did not arrive within "
            f"{self._wait_limit_s:g} s, in step {self._number} or the one before. The state is "
            "lost; load it again before the next step."
        )

    def _lose_state(self) -> None:
        self._missing |= set(self.schedule.graph.replaced) & set(self.schedule.holders)


def _check_devices(names: list[str]) -> None:
    for name in names:
        kind, _, index = name.partition(":")
        if kind != "cuda" or not index.isdigit():
            raise InputError(
                f"Ops run either all on CUDA devices or all on logical CPU devices: {name!r} has "
                f"ops beside {', '.join(other for other in names if other != name)}. Exclude it "
                "and plan again."
            )
        if int(index) >= torch.cuda.device_count():
            raise InputError(
                f"The plan uses {name}, but there are {torch.cuda.device_count()} CUDA devices. "
                "Plan for this machine."
            )
    if len(set(names)) < len(names):
        raise InputError(f"A CUDA device cannot be listed twice: {', '.join(names)}.")
