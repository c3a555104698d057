"""Choose the executor for a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from devplace.run.copies import clone_tensor
from devplace.run.cpu import CpuExecutor, StepOutcome
from devplace.run.mailbox import CopyFunction
from devplace.run.schedule import Schedule, is_cpu

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
    if not runs_on_cuda(schedule):
        if processes is not None:
            copy = processes.copy
        return CpuExecutor(schedule, seed, copy, keeps_old_state, processes)
    from devplace.run.cuda import CudaExecutor

    return CudaExecutor(
        schedule,
        seed,
        waits=waits,
        predicted_bytes=predicted_bytes,
        staged_pairs=staged_pairs,
        processes=processes,
    )


def used_devices(schedule: Schedule) -> list[str]:
    """torch devices that a schedule's ops run on."""
    names = zip(schedule.device_names, schedule.instructions, strict=True)
    used = [name for name, some in names if some]
    if not runs_on_cuda(schedule):
        return ["cpu"]
    return list(dict.fromkeys("cpu" if is_cpu(name) else name for name in used))


def runs_on_cuda(schedule: Schedule) -> bool:
    """Whether any op is on a CUDA device of this computer, in a step captured for CUDA.

    A step captured on a CPU has other ops (dropout, attention); on logical CPU devices it can be
    tried wherever a plan puts it.
    """
    if schedule.graph.program.device != "cuda":
        return False
    names = zip(schedule.device_names, schedule.instructions, strict=True)
    if not any(some and name.startswith("cuda") for name, some in names):
        return False
    import torch

    return bool(torch.cuda.is_available())
