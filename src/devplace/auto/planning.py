"""The one way from a model to a plan; `parallelize` and the command line both go it.

Example:
    target = find_target(machine, limits, pins, exclude)  # machine
    graph = target.capture(model, batch, loss_fn, optimizer)  # capture
    problem = target.problem(graph)  # price, problem
    result = place(problem, placer, budget, seed)  # place
    found = confirm(result, batch)  # confirm
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from devplace.auto.local_devices import (
    MachineLike,
    accelerators,
    capture_device,
    cpus,
    excluded,
    find_machine,
    fuses,
    require_here,
)
from devplace.cost.analytic import Analytic
from devplace.device_kinds import is_accelerator
from devplace.errors import InputError, PlanMismatchError
from devplace.graph import Captured, OpGraph
from devplace.graph.fusion import fuse_for
from devplace.machine import Machine
from devplace.problem import Problem
from devplace.problem.device_names import require_mapping, resolve_device, without_memory

if TYPE_CHECKING:
    from devplace.cost.worker_process import WorkerProcess

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """Where a step is to be placed, and what is demanded of that.

    Attributes:
        machine: If it was detected and the step is captured for CUDA, its links are as measured.
        device: torch device type the step is captured for.
        fuse: Whether ops that one compiled kernel can compute become one op.
        limits, pins, exclude: See `Problem`; `left_out` are in `exclude`.
        unused: Devices that are excluded or have a limit of 0: they need no pricing.
        left_out: CPUs beside GPUs that nobody asked for.
    """

    machine: Machine
    device: str
    fuse: bool
    limits: Mapping[str, int | str]
    pins: Mapping[str, str]
    exclude: tuple[str, ...]
    unused: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that may be used."""
        return tuple(name for name in self.machine.device_names if name not in self.unused)

    def capture(
        self,
        model: Any,
        inputs: Any = (),
        loss_fn: Any = None,
        optimizer: Any = None,
        micro_batches: int = 1,
        **options: Any,
    ) -> Captured:
        """Capture a step for these devices; fused groups are parted around the pins.

        Args:
            model: The model, or a step that is captured already.
            inputs, loss_fn, optimizer, micro_batches, options: As for `capture`.

        Raises:
            CaptureError: The step cannot be one graph.
            InputError: The captured step is for other devices.
        """
        if isinstance(model, Captured):
            if model.meta["device"] != self.device:
                raise InputError(
                    f"The step is captured for {model.meta['device']!r}, and what may be used of "
                    f"machine {self.machine.name!r} runs steps captured for {self.device!r}: give "
                    f"capture device={self.device!r}."
                )
            return fuse_for(model, self.pins)
        from devplace.step_capture import capture

        given = (model, inputs, loss_fn, optimizer, micro_batches)
        graph = capture(*given, fuse=self.fuse, device=self.device, **options)
        return fuse_for(graph, self.pins)

    def problem(
        self,
        graph: OpGraph,
        *,
        times_cpus: bool = False,
        tell: Tell | None = None,
        child: WorkerProcess | None = None,
    ) -> Problem:
        """Price a step, and pose its placement as a problem.

        Args:
            graph: The step.
            times_cpus: Whether its ops are timed on the CPUs of this computer, too. On its GPUs
                they are in any case; on other devices costs are analytic.
            tell: Told how far the compiling of fused groups is.
            child: Process that times ops; by default one is started.
        """
        if times_cpus or is_accelerator(self.device):
            from devplace.tune.measured_costs import price

            costs = price(graph, self.machine, self.unused, tell=tell, child=child)
        else:
            costs = Analytic()(graph, self.machine)
        if self.left_out:
            names = ", ".join(self.left_out)
            note = f"left out beside GPUs: {names}; uses_cpu=True (--cpu) lets ops go there"
            costs = replace(costs, notes=(*costs.notes, note))
        return Problem(
            graph, self.machine, costs, limits=self.limits, pins=self.pins, exclude=self.exclude
        )


def find_target(
    machine: MachineLike = "detect",
    limits: Mapping[str, int | str] | None = None,
    pins: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    *,
    uses_cpu: bool = False,
    runs: bool = False,
    in_part: bool = False,
    device: str = "",
    fuse: bool | None = None,
    tell: Tell | None = None,
) -> Target:
    """The devices that are meant, and how a step is captured for them. Names are checked first.

    Args:
        machine: See `find_machine`.
        limits, pins, exclude: See `Problem`.
        uses_cpu: Whether ops may go to CPUs beside GPUs that no pin names. Where there is no GPU,
            CPUs are used in any case.
        runs: Whether the devices must be those of this computer.
        in_part: Whether other processes have some of the devices.
        device: torch device type that the step of a plan was captured for; by default `cuda` if the
            machine's GPUs are here.
        fuse: As for `capture`; by default on GPUs for which a compiler is there. Of GPUs that are
            not here those are meant that it makes kernels for.
        tell: Told that links are probed, which takes seconds.

    Raises:
        MachineError, ProblemError, InputError: No such machine, device or size; devices that must
            be here and are not.
        PlanMismatchError: A step captured for CUDA, where there is no GPU.
    """
    found, limits, pins = find_machine(machine), limits or {}, pins or {}
    empty = without_memory(found, limits)
    require_mapping("pins", pins)
    pinned = [resolve_device(found, name, f"pin {pattern!r}") for pattern, name in pins.items()]
    named = excluded(found, exclude)
    if runs and not in_part:
        require_here(found, (*named, *empty))
    if is_accelerator(device):
        _require_cuda()
    device = device or capture_device(found, (*named, *empty), in_part)
    is_fast = bool(accelerators(found, (*named, *empty)))
    left_out = cpus(found, (*named, *empty, *pinned)) if is_fast and not uses_cpu else ()
    unused = tuple(dict.fromkeys((*named, *left_out, *empty)))
    if machine == "detect" and is_accelerator(device):
        from devplace.tune.measured_costs import measured_machine

        if tell is not None:
            tell("probing links")
        found = measured_machine(found)
    if fuse is None:
        fuse = fuses(device, accelerators(found, unused))
    return Target(found, device, fuse, limits, pins, (*named, *left_out), unused, left_out)


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise PlanMismatchError(
            "The plan is of a step captured for CUDA devices, and this computer has none. Use it "
            "where it was made, or plan again."
        )
