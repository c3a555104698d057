"""The executor for CUDA devices, and CPU devices beside them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

import torch

from devplace.cost.streams import make_work_buffers
from devplace.device_kinds import is_host
from devplace.errors import (
    DeviceLostError,
    DeviceMemoryError,
    ExecutionError,
    GraphCaptureError,
    InputError,
    LateTensorError,
    RankError,
)
from devplace.run.cpu import StepOutcome
from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.device_memory import DeviceMemory, device_memory
from devplace.run.cuda.eager import AnyDevice, EagerRunner
from devplace.run.cuda.expandable import expandable_segments
from devplace.run.cuda.failures import (
    forget_frames,
    is_lasting,
    is_out_of_memory,
    lost_device_error,
    memory_error,
    step_error,
)
from devplace.run.cuda.graphs import GraphRunner
from devplace.run.cuda.host import HostClock, HostCrew, HostDevice
from devplace.run.cuda.nccl_channels import NcclChannels
from devplace.run.cuda.peer_channels import PeerChannels
from devplace.run.cuda.push import Push, push
from devplace.run.cuda.random_ops import RandomOps
from devplace.run.cuda.ranks import GpuRanks
from devplace.run.cuda.routes import Route, check_cpu_ops, find_routes, has_cpu_form
from devplace.run.cuda.timestamps import Clock, collect, make_clocks, offset_ns
from devplace.run.ranks.processes import Processes
from devplace.run.seeds import RandomKeys
from devplace.schedule import Schedule, source_bytes, stored_sources
from devplace.schedule.linear import linear_order
from devplace.schedule.write_back import write_backs


class CudaExecutor:
    """Runs a schedule on CUDA devices and keeps parameters, buffers and state between steps.

    Every GPU's ops are captured once, in plan order, into a CUDA graph of its own. Tensors are
    pushed into fixed buffers of their receivers, which wait for them on the device. A step that
    cannot be captured runs op by op. Ops on CPU devices are run by host threads beside the graphs.
    Tensors from and to CPU devices, and between GPUs without peer access, go through pinned host
    memory. Devices of the schedule that run nothing are not touched.

    Args:
        schedule: What every device does; its device names are torch device names, those of CPU
            devices `cpu:0`, `cpu:1` and so on.
        seed: Seed of the random ops.
        waits: Whether `step` waits for its end. If not, a failure shows in a later call.
        wait_limit_s: How long a device may wait for a tensor, s.
        uses_graphs: Whether CUDA graphs are tried at all.
        push: Carries a tensor to another GPU (for tests of faulty links).
        needs_graphs: Whether a step that cannot be captured is refused.
        predicted_bytes: Device name -> peak that the plan predicted, for messages.
        staged_pairs: (sender, receiver) names of GPUs whose direct link is not to be used.
        processes: Those that run the other devices, if there are any; the schedule is then the part
            of this one, which has one GPU.

    Raises:
        InputError: Ops on a device that is neither GPU nor CPU, is missing, or is listed twice.
        PlanError: An op on a CPU device has no CPU form, or draws random numbers.
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
        needs_graphs: bool = False,
        predicted_bytes: Mapping[str, int] | None = None,
        staged_pairs: frozenset[tuple[str, str]] = frozenset(),
        processes: Processes | None = None,
    ) -> None:
        self.schedule = schedule
        self.processes = processes
        # What is known only of all devices together, such as an order, is worked out of this one.
        self._whole = schedule if processes is None else processes.schedule
        self.seed = seed
        self.put_count: dict[int, int] = {}
        self.reason = "" if uses_graphs else "graphs are switched off"
        self._waits = waits
        self._wait_limit_s = wait_limit_s
        self._push = push
        self._needs_graphs = needs_graphs
        self._predicted_bytes = dict(predicted_bytes or {})
        self._lost: DeviceLostError | None = None
        self._doing = "Holding the state"
        self._reserved_peak: dict[int, int] = {}
        self._number = 0
        self._is_closed = False
        self._missing = set(schedule.holders)
        self._random_keys = RandomKeys(schedule.captured)
        active = [index for index, some in enumerate(schedule.instructions) if some]
        _check_devices([schedule.device_names[index] for index in active])
        check_cpu_ops(schedule, has_cpu_form)
        hosts = [index for index in active if is_host(schedule.device_names[index])]
        self._hosts = {
            index: HostDevice(index, frozenset(schedule.graph.replaced)) for index in hosts
        }
        inputs = [b.op for b in schedule.captured.program.bindings if b.kind == "input"]
        self._devices = {
            index: CudaDevice(
                index,
                schedule.device_names[index],
                source_bytes=source_bytes(schedule, index),
                inputs=inputs,
            )
            for index in active
            if index not in self._hosts
        }
        self._all: dict[int, AnyDevice] = {**self._hosts, **self._devices}
        self._ranks: GpuRanks | None = None
        self._routes: tuple[Route, ...] = ()
        if processes is None:
            self._routes = find_routes(schedule, have_peer_access, staged_pairs)
        else:
            self._ranks = GpuRanks(processes, list(self._all.values()))
        self._idle: dict[int, Any] = {}
        self._random = self._make_random()
        self._order = linear_order(self._whole)
        self._writes = write_backs(self._whole)
        self._runner: EagerRunner | GraphRunner | None = None

    @property
    def mode(self) -> str:
        """`graph`, `eager`, or empty before the first step; `reason` says why not `graph`."""
        return self._runner.mode if self._runner is not None else ""

    @property
    def transport(self) -> str:
        """What carries tensors between processes: `shared memory` or `nccl`; empty for one."""
        return self._ranks.transport if self._ranks is not None else ""

    def put(self, op: int, value: Any) -> None:
        """Give a source op its value: a copy on every device that holds it.

        Args:
            op: Index of the source op.
            value: Its tensor, on any torch device.
        """
        self._raise_lost()
        try:
            for index in self.schedule.holders.get(op, ()):
                if index in self._all:
                    self._all[index].put(op, value)
                else:
                    self._idle[op] = value.detach().clone()
                self.put_count[op] = self.put_count.get(op, 0) + 1
        except RuntimeError as error:
            failure = self._failure("Holding the state", error)
        else:
            self._missing.discard(op)
            return
        self._fail(failure)

    def get(self, op: int) -> Any:
        """The present value of a source op, as held on its home; not a copy."""
        holders = self.schedule.holders[op]
        home = self.schedule.device_of_op[op]
        index = home if home in holders else holders[0]
        if index not in self._all:
            return self._idle[op]
        self.synchronize()
        if op in self._missing:
            raise ExecutionError(
                f"The value of {self.schedule.graph.ops[op].name!r} was lost with a step that "
                "failed. Load the state again."
            )
        return self._all[index].buffers[op]

    def take(self, other: CudaExecutor, ops: Mapping[int, int]) -> None:
        """Go on with values of sources in the memory where another shape of the step keeps them;
        only what a device did not hold there is copied.

        Args:
            other: What runs that shape; its last step is waited for.
            ops: Source op here -> source op there.

        Raises:
            ExecutionError: The other's last step failed, or memory is lacking.
        """
        other.synchronize()
        for mine, theirs in ops.items():
            holders = self.schedule.holders.get(mine, ())
            if all(index in self._all and index in other._all for index in holders) and all(
                theirs in other._all[index].buffers for index in holders
            ):
                for index in holders:
                    self._all[index].share(mine, other._all[index].buffers[theirs])
                self._missing.discard(mine)
            else:
                self.put(mine, other.get(theirs))

    def step(self, number: int, is_timed: bool = False) -> StepOutcome:
        """Run one step on the values put, and keep what it leaves behind for the next.

        Args:
            number: 1-based number of the step; with the seed it fixes all random numbers.
            is_timed: Whether to measure the timeline (1-2 us more per op, and a new capture).

        Raises:
            ExecutionError: An op failed or a tensor did not come; the state must be put again.
            DeviceMemoryError: Too little memory; what was held is given back.
            DeviceLostError: A device cannot be used any more in this process.
        """
        self._raise_lost()
        if self.processes is not None:
            self.processes.group.check()
        if self._is_closed:
            raise ExecutionError("A closed step cannot run: its graphs are gone. Compile again.")
        self._raise_failure()
        for op, key in self._random_keys.of_step(self.seed, number).items():
            self.put(op, key)
        self._check_complete()
        for device in self._devices.values():
            device.let_users_write()
        self._number = number
        try:
            with torch.no_grad():
                if self._runner is None:
                    self._runner = self._make_runner(number)
                self._doing = f"Step {number}"
                return self._run_timed(number) if is_timed else self._run(number)
        except LateTensorError:
            raise
        except RankError:
            self._lose_state()
            raise
        except (RuntimeError, ExecutionError) as error:
            failure = self._failure(self._doing, error)
        except BaseException:  # such as the user's interrupt
            self._lose_state()
            raise
        self._fail(failure)

    def _failure(self, what: str, error: BaseException) -> ExecutionError:
        """The error to raise once the one that happened, and what it holds, is forgotten."""
        if isinstance(error, (DeviceLostError, DeviceMemoryError)):
            return error
        names = tuple(str(device.torch_device) for device in self._devices.values())
        if is_lasting(error):
            return lost_device_error(what, error)
        if is_out_of_memory(error):
            found = memory_error(what, error, self._predicted_bytes, names)
            forget_frames(error)
            return found
        failure = step_error(self._number, error)
        if failure is not error:
            failure.__cause__ = error
        return failure

    def _fail(self, failure: ExecutionError) -> NoReturn:
        """Note what is lost, give memory back, and raise."""
        self._lose_state()
        if isinstance(failure, DeviceLostError):
            self._lost = failure
        elif isinstance(failure, DeviceMemoryError):
            self._release()
        raise failure

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise DeviceLostError(str(self._lost))

    def _release(self) -> None:
        """Give back everything held on the devices."""
        with suppress(RuntimeError):
            for device in self._devices.values():
                device.synchronize()
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        for place in self._all.values():
            place.release()
        self._missing = set(self.schedule.holders)
        self._random = self._make_random()
        gc.collect()
        torch.cuda.empty_cache()

    def measured_memory(self) -> tuple[DeviceMemory, ...]:
        """Memory of every GPU in use, beside what was needed at once; see `DeviceMemory`."""
        found = []
        for index, device in self._devices.items():
            self._note_reserved()
            peak = pool = 0
            if isinstance(self._runner, GraphRunner):
                peak = self._runner.step_peak_bytes[index]
                pool, _ = self._runner.pool_bytes(index)
            found.append(device_memory(device, peak, self._reserved_peak[index], pool))
        return tuple(found)

    def _note_reserved(self) -> None:
        """Torch's counters are reset at times; remember what they have reached."""
        for index, device in self._devices.items():
            seen = int(torch.cuda.max_memory_reserved(device.torch_device))
            self._reserved_peak[index] = max(seen, self._reserved_peak.get(index, 0))

    def _run(self, number: int) -> StepOutcome:
        assert self._runner is not None
        results = self._runner.run(number)
        outcome = StepOutcome(self._of_everyone(results))
        if self._waits:
            self.synchronize()
        elif self._ranks is not None:  # a process that is gone is seen in waiting alone
            self._ranks.follow()
        return outcome

    def _run_timed(self, number: int) -> StepOutcome:
        assert self._runner is not None
        clocks: dict[int, Clock] = dict(make_clocks(self.schedule, self._devices))
        clocks |= {index: HostClock() for index in self._hosts}
        offsets = {index: offset_ns(device) for index, device in self._devices.items()}
        results = self._of_everyone(self._runner.run(number, clocks))
        self.synchronize()
        return StepOutcome(results, collect(self.schedule, clocks, offsets))

    def _of_everyone(self, results: dict[int, Any]) -> dict[int, Any]:
        """With those of other processes, which graphs bring themselves."""
        if self.processes is None or self.mode == "graph":
            return results
        (device,) = self._devices.values()
        found = self.processes.share_results(results)
        return {index: value.to(device.torch_device) for index, value in found.items()}

    def synchronize(self) -> None:
        """Wait for all steps.

        Raises:
            ExecutionError: A tensor did not come in time.
        """
        self._raise_lost()
        if self._ranks is not None:
            try:
                self._ranks.wait()
            except RankError:  # what the GPU still made of the step is worthless
                self._lose_state()
                raise
        try:
            for device in self._all.values():
                device.synchronize()
        except RuntimeError as error:
            failure = self._failure("A step", error)
        else:
            self._raise_failure()
            return
        self._fail(failure)

    def close(self) -> None:
        """Free graphs and threads; the executor cannot step any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._ranks is not None and not self._ranks.is_over:
            with suppress(RankError):
                self._ranks.wait()
        if self._lost is None and (self._ranks is None or not self._ranks.is_over):
            for host in self._hosts.values():
                host.synchronize()
            for device in self._devices.values():
                device.synchronize()
                device.give_up_stream()
        if self._runner is not None:
            self._runner.close()
        if self._ranks is not None:
            self._ranks.close()

    def _make_random(self) -> dict[int, RandomOps]:
        program = self.schedule.captured.program
        random = {}
        for index, device in self._all.items():
            calls = (op for kind, op, _ in self.schedule.instructions[index] if kind == "call")
            used = {program.calls[op].node.name for op in calls}
            random[index] = RandomOps(program.random_ops, used, device.torch_device, self.seed)
        return random

    def _make_runner(self, number: int) -> EagerRunner | GraphRunner:
        """A step without graphs first: it warms libraries up and shows how tensors are laid out."""
        self._doing = "Warming up"
        eager = self._make_eager()
        if self.reason:
            return eager
        eager, arena_bytes = self._rehearse(eager, number)
        runner = self._capture(eager, arena_bytes)
        if self.processes is not None:
            reasons = self.processes.group.exchange("capture", self.reason, "the capture")
            self.reason = self.reason or next(filter(None, reasons), "")
        if runner is not None and not self.reason:
            return runner
        if self._needs_graphs:
            raise GraphCaptureError(
                f"Only CUDA graphs were allowed, and {self.reason}. Allow eager mode, or change "
                "the op that waits for the host."
            )
        if runner is not None:
            runner.close()
        self._random = self._make_random()
        return self._make_eager()

    def _capture(self, eager: EagerRunner, arena_bytes: dict[int, int]) -> GraphRunner | None:
        """The step in graphs; None if it cannot be captured, for `reason`."""
        self._doing = "Capturing the step"
        try:
            mailroom = self._make_mailroom(eager.layouts)
            runner = GraphRunner(
                mailroom,
                self._devices,
                self._random,
                self._writes,
                eager.strides,
                arena_bytes,
            )
            if self._hosts and isinstance(mailroom, PeerChannels):
                runner.crew = self._make_crew(mailroom)
            return runner
        except (ExecutionError, RuntimeError, ImportError) as error:
            if isinstance(error, RankError) or is_out_of_memory(error) or is_lasting(error):
                raise
            self.reason = f"the step cannot be captured: {str(error).splitlines()[0]}"
            return None

    def _make_mailroom(self, layouts: dict[int, Any]) -> PeerChannels | NcclChannels:
        channels = (
            self._ranks.channels(layouts)
            if self._ranks is not None
            else PeerChannels(
                *(self.schedule, self._devices, layouts, self._push),
                *(self._wait_limit_s, self._routes),
            )
        )
        channels.rehearse()
        return channels

    def _rehearse(self, eager: EagerRunner, number: int) -> tuple[EagerRunner, dict[int, int]]:
        """Try a step; where it finds too little memory, once more without keeping large values."""
        for device in self._devices.values():
            make_work_buffers(device.main)
        torch.cuda.empty_cache()
        gpus = list(self._devices.values())
        with expandable_segments(str(gpus[0].torch_device) if gpus else ""):
            try:
                arena_bytes = eager.rehearse(number)
            except (RuntimeError, ExecutionError) as error:
                if not is_out_of_memory(error):
                    raise
                forget_frames(error)
                arena_bytes = {}
            if not arena_bytes and gpus:
                gc.collect()
                torch.cuda.empty_cache()
                eager = self._make_eager()
                eager.rehearse_lightly(number)
                self._note_reserved()
        for index, seen in eager.reserved_peak_bytes.items():
            self._reserved_peak[index] = max(seen, self._reserved_peak.get(index, 0))
        torch.cuda.empty_cache()
        return eager, arena_bytes

    def _make_eager(self) -> EagerRunner:
        return EagerRunner(
            self._whole,
            self._all,
            self._random,
            [place for place in self._order if place[0] in self._all],
            self._writes,
            self._routes,
            self.processes,
        )

    def _make_crew(self, mailroom: PeerChannels) -> HostCrew:
        return HostCrew(
            self.schedule,
            self._hosts,
            mailroom.board,
            self._routes,
            self.seed,
            mailroom.limit_ns,
        )

    @property
    def has_lost_state(self) -> bool:
        """Whether a failure has cost parameters or state, so that they must be put again."""
        return self._lost is not None or bool(self._missing & stored_sources(self.schedule))

    def _check_complete(self) -> None:
        if self._missing:
            name = self.schedule.graph.ops[min(self._missing)].name
            raise ExecutionError(
                f"Every source needs a value before a step: {name!r} and "
                f"{len(self._missing) - 1} others have none. Load the state again."
            )

    def _raise_failure(self) -> None:
        error = self._runner.host_failure() if self._runner is not None else None
        if error is not None:
            self._lose_state()
            raise error
        failed = self._runner.failed_transfer() if self._runner is not None else None
        if failed is None:
            return
        self._lose_state()
        schedule = self.schedule
        tensor, src, dst, num_bytes = schedule.transfers[failed]
        producer, consumer = self._ends_of(failed)
        raise LateTensorError(
            f"Transfer of tensor {schedule.graph.tensors[tensor].name!r} ({num_bytes} bytes) from "
            f"{schedule.device_names[src]} (made by {producer!r}) to {schedule.device_names[dst]} "
            f"(read by {consumer!r}) did not arrive within {self._wait_limit_s:g} s, in step "
            f"{self._number} or the one before. The state is lost; load it again before the next "
            "step."
        )

    def _ends_of(self, transfer: int) -> tuple[str, str]:
        """Names of the op that makes a transferred tensor and of the first that reads it."""
        schedule, record = self.schedule, self.schedule.transfers[transfer]
        ops = schedule.graph.ops
        producer = ops[schedule.graph.producer[record.tensor]].name
        readers = (
            ops[op].name
            for kind, op, _ in schedule.instructions[record.dst]
            if kind == "call" and record.tensor in ops[op].inputs
        )
        return producer, next(readers, "the step's results")

    def _lose_state(self) -> None:
        self._missing |= set(self.schedule.graph.replaced) & set(self.schedule.holders)


def _check_devices(names: list[str]) -> None:
    for name in names:
        kind, _, index = name.partition(":")
        if is_host(name):
            continue
        if kind != "cuda" or not index.isdigit():
            raise InputError(
                f"A step captured for CUDA runs on cuda:0, cuda:1, ... and CPU devices: {name!r} "
                f"has ops and is neither. Plan for this machine."
            )
        if int(index) >= torch.cuda.device_count():
            raise InputError(
                f"The plan uses {name}, but there are {torch.cuda.device_count()} CUDA devices. "
                "Plan for this machine."
            )
    if len(set(names)) < len(names):
        raise InputError(f"A device cannot be listed twice: {', '.join(names)}.")


@cache
def have_peer_access(src: str, dst: str) -> bool:
    """Whether a GPU can store into another's memory."""
    return bool(torch.cuda.can_device_access_peer(torch.device(src), torch.device(dst)))
