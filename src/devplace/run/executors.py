"""Choose the executor for a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from devplace.device_kinds import CPU, is_host, kind_of
from devplace.run.copies import clone_tensor
from devplace.run.cpu import CpuExecutor, StepOutcome
from devplace.run.mailbox import CopyFunction
from devplace.schedule import Schedule

if TYPE_CHECKING:
    from devplace.run.ranks.processes import Processes


class Executor(Protocol):
    """Runs a schedule and keeps parameters, buffers and state between steps."""

    schedule: Schedule

    def put(self, op: int, value: Any) -> None:
        """Give a source op its value."""
        ...

    def get(self, op: int) -> Any:
        """The present value of a source op."""
        ...

    def take(self, other: Any, ops: Mapping[int, int]) -> None:
        """Take over values of sources from an executor of the same kind that runs another shape of
        the step, which may lack them then. `ops` are source ops here -> there."""
        ...

    def step(self, number: int, is_timed: bool = False) -> StepOutcome:
        """Run one step."""
        ...

    @property
    def has_lost_state(self) -> bool:
        """Whether a failure has cost parameters or state, so that they must be put again."""
        ...

    def close(self) -> None:
        """Free what is held."""
        ...


def make_executor(
    schedule: Schedule,
    seed: int = 0,
    copy: CopyFunction = clone_tensor,
    keeps_old_state: bool = True,
    waits: bool = True,
    predicted_bytes: Mapping[str, int] | None = None,
    staged_pairs: frozenset[tuple[str, str]] = frozenset(),
    processes: Processes | None = None,
) -> Executor:
    """The executor for the devices that have something to do.

    Args:
        schedule: What every device does.
        seed: Seed of the random ops.
        copy: Makes copies between logical CPU devices.
        keeps_old_state: Of logical CPU devices; GPUs never keep it.
        waits: Whether each step on GPUs is waited for; if not, a failure shows in a later call.
        predicted_bytes: Device name -> peak that the plan predicted, for messages.
        staged_pairs: (sender, receiver) names of GPUs whose direct link is not to be used, as a
            probe found it faulty: their tensors go through host memory.
        processes: Those that run the other devices, if there are any; the schedule is then the part
            of this one.

    Raises:
        InputError: CUDA devices that are not there.
        PlanError: An op on a CPU device beside GPUs that cannot run there.
    """
    if not accelerators_used(schedule):
        if processes is not None:
            copy = processes.copy
        return CpuExecutor(schedule, seed, copy, keeps_old_state, processes)
    module, _, name = kind_of(schedule.captured.program.device).executor.partition(":")
    executor: Executor = getattr(import_module(module), name)(
        schedule,
        seed,
        waits=waits,
        predicted_bytes=predicted_bytes,
        staged_pairs=staged_pairs,
        processes=processes,
    )
    return executor


def used_devices(schedule: Schedule) -> list[str]:
    """torch devices that a schedule's ops run on."""
    if not accelerators_used(schedule):
        return [CPU.torch_type]
    host = CPU.torch_type
    return list(dict.fromkeys(host if is_host(name) else name for name in _active(schedule)))


def accelerators_used(schedule: Schedule) -> list[str]:
    """Names of this computer's devices, of the kind a step was captured for, that have ops; none
    if the step runs on logical CPU devices.

    A step captured on a CPU has other ops (dropout, attention); on logical CPU devices it can be
    tried wherever a plan puts it.
    """
    kind = kind_of(schedule.captured.program.device)
    names = [name for name in _active(schedule) if name.startswith(kind.torch_type)]
    if not kind.executor or not names:
        return []
    import torch

    return names if torch.get_device_module(kind.torch_type).is_available() else []


def _active(schedule: Schedule) -> list[str]:
    names = zip(schedule.device_names, schedule.instructions, strict=True)
    return [name for name, some in names if some]
