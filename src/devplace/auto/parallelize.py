"""From a model to the fastest measured step in one call."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from devplace.auto.budget_clock import BudgetClock
from devplace.auto.further_shapes import FurtherShapes, stated
from devplace.auto.local_devices import MachineLike, find_machine
from devplace.auto.parallel_job import Job
from devplace.auto.parallel_step import ParallelStep
from devplace.auto.planning import find_target
from devplace.auto.shared_choice import (
    share_candidate,
    share_fusing,
    share_machine,
    why_unmeasured,
)
from devplace.errors import (
    InfeasibleError,
    InputError,
    did_you_mean,
)
from devplace.graph import Captured
from devplace.kernels.compilers import Compilers
from devplace.kernels.prepare import any_compiled
from devplace.placers import Placer
from devplace.run.planned import check_batch_kind
from devplace.run.ranks.group import Group, several_processes
from devplace.step_capture import capture
from devplace.step_capture.micro_batches.chunks import Known
from devplace.step_capture.refuse import unwrap
from devplace.tune.candidates import Candidate
from devplace.tune.confirm import Confirmation
from devplace.tune.measure import Measurer

_TOO_SLOW = (
    "No plan was measured within {:.3g} s, so the best predicted one is used unmeasured: the "
    "computer is busy, or steps take long. Give a larger budget, as budget='5min'."
)
MICRO_BATCHES = (1, 2, 4, 8)


def parallelize(
    model: torch.nn.Module | Captured,
    example_inputs: Any = (),
    loss_fn: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    machine: MachineLike = "detect",
    budget: str = "60s",
    limits: Mapping[str, int | str] | None = None,
    pins: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    uses_cpu: bool = False,
    micro_batches: int | str = 1,
    seed: int = 0,
    placer: Placer | None = None,
    confirm: bool = True,
    verify: bool = False,
    compare_compile: bool = False,
    progress: Callable[[str], None] | None = None,
    shapes: Sequence[Any] = (),
    max_shapes: int = 1,
    ranks: Mapping[str, int] | None = None,
    batch: str = "whole",
    timeout_s: float = 30.0,
    **of_capture: Any,
) -> ParallelStep:
    """Plan a step for the devices of this computer, confirm by running, and make it callable.

    The step is captured, priced and searched; the best few plans, the best single device and the
    even split are then run in a process of their own, and the fastest measured is taken. So the
    result is never slower than the best single device that fits, as measured. Your own step is
    timed, too, and the report says where it is faster. Where nothing can be measured in time, a
    warning says so and the best predicted plan is taken. Model and optimizer are not changed by
    this, and by training only with `sync`.

    Under `torchrun`, or in a process group of several processes, all of them call this; the first
    one plans for its `machine`, and all run its plan together, as `compile` has it. Plans are
    measured only where the first process has all devices in reach.

    Args:
        model: The model, on the CPU or a GPU, in the mode (train or eval) it shall run in; or a
            step of it, of `capture`, which has its own loss, optimizer and options.
        example_inputs: A tensor, a tuple of positional inputs, or a dict of keyword inputs. Shapes
            and dtypes are fixed; integers among them are used to measure.
        loss_fn: As for `capture`; None with an optimizer: the model returns the loss. None without
            one: inference, the step returns the model's output.
        optimizer: As for `capture`.
        machine: `detect`, a preset's name, a machine file, a machine, or a number of logical CPU
            devices; its devices must be those of this computer.
        budget: Time for everything, capture and confirmation included, as `60s` or `2min`. With a
            number of evaluations, as `500ev`, the search is reproducible; measuring takes its time
            (`500ev,60s` bounds both).
        limits: Device name -> most bytes a step may use there (integer or text such as `20GiB`);
            0: it is not used.
        pins: Pattern -> device name, see `Problem`.
        exclude: Names of devices that must not be used.
        uses_cpu: Whether ops may go to CPUs beside GPUs. Without GPUs, and where pins name them,
            CPUs are used anyway.
        micro_batches: Chunks of the batch; `auto` tries 1, 2, 4 and 8 on two or more devices.
        seed: Of the search and of all random ops.
        placer: Who searches; `placers.Search()` by default.
        confirm: Whether plans are measured; if not, the best predicted is taken.
        verify: Whether two steps are first compared with the unplaced ones, and the first of those
            with an eager step; the notes say what was compared.
        compare_compile: Whether the report tells how fast `torch.compile` makes the user's own
            step on one device; that may take minutes, which the budget does not count.
        progress: Called with what is being done.
        shapes: Further batches, each in a form that `example_inputs` may have: the step takes
            batches of their shapes, too. They are planned with the weights where the plan of the
            example has them, which all shapes share, and compiled when they are first met. Of
            the budget each gets half of what the example does.
        max_shapes: Shapes in all. A batch of another shape is captured and planned when it is met,
            while there are fewer, and refused then. 1: only those given.
        ranks, batch, timeout_s: Of several processes, as for `compile`.
        of_capture: All else that `capture` takes, such as `example_kwargs`, `batch_dims`,
            `clip_grad_norm`, `autocast`. `fuse` is on by default where GPUs have a compiler, and
            `recompute` where nothing fits without it.

    Returns:
        A step: `loss = step(*batch)`; `step.sync()` writes back; `print(step)` says why this plan.

    Raises:
        InputError: A bad argument, a model on the meta device, or devices that are not here.
        CaptureError: The step cannot be one graph; says where and what to do.
        InfeasibleError: Nothing within the memory limits was found.
        ExecutionError: No plan could be run, for other reasons than time; says what happened to
            each.
        VerificationError: With `verify`, the placed step gave other numbers.
    """
    whole = BudgetClock.parse(budget)
    clock = whole.shared_with(len(shapes) if isinstance(shapes, (tuple, list)) else 0)
    if progress is not None and not callable(progress):
        raise InputError(f"progress must be a function of a text, such as print, got {progress!r}.")
    tell = progress or (lambda text: None)
    if isinstance(model, Captured):
        given = {"loss_fn": loss_fn, "optimizer": optimizer, "micro_batches": micro_batches}
        _refuse_second(given | of_capture)
        fuse = bool(model.meta["fuse"])
    else:
        _check_options(of_capture)
        fuse = of_capture.pop("fuse", None)
        of_capture["known"] = Known()
    _check_model(model.model if isinstance(model, Captured) else model)
    check_batch_kind(batch)
    group = Group(timeout_s) if several_processes() else None
    if group is not None:
        machine = share_machine(group, find_machine(machine))
    target = find_target(
        *(machine, limits, pins, exclude),
        uses_cpu=uses_cpu,
        runs=True,
        in_part=group is not None,
        fuse=fuse,
        tell=tell,
    )
    own = model, example_inputs, loss_fn, optimizer
    further = None
    if _wants_shapes(shapes, max_shapes, model, group):
        further = FurtherShapes(
            target,
            (model, loss_fn, optimizer),
            of_capture,
            stated(shapes, example_inputs, of_capture.get("example_kwargs")),
            max_shapes,
            whole,
            placer,
            seed,
            tell,
        )
    job = Job(
        example_inputs,
        of_capture.get("example_kwargs"),
        lambda count, **more: target.capture(*own, count, **{**of_capture, **more}),
        target,
        clock,
        tell,
    )

    def choose_alone() -> tuple[Confirmation | None, list[Candidate]]:
        counts = _counts(micro_batches, model, job)
        early = Compilers() if target.fuse and not any_compiled(target.device) else None
        with Measurer(seed=seed) as measurer, early or contextlib.nullcontext() as compilers:
            if confirm:
                measurer.start()
            graphs = job.capture_all(counts)
            if further is not None:
                further.capture_early(graphs[0])
            searched = placer, seed, measurer.child, confirm
            job.compile_kernels(graphs, compilers)
            try:
                results = job.search(graphs, *searched)
            except InfeasibleError as error:
                if "recompute" in of_capture or isinstance(model, Captured):
                    raise
                graphs = job.capture_again(graphs[-1], error)
                job.compile_kernels(graphs, compilers)
                results = job.search(graphs, *searched)
            found, ranked = job.choose(results, measurer if confirm else None)
        if found is not None and not found.ranked:
            warnings.warn(_TOO_SLOW.format(found.seconds), stacklevel=3)
        if compare_compile:
            job.compare(graphs[0])
        return found, ranked

    if group is None:
        step = job.finish(*choose_alone(), seed, verify)
        if further is not None:
            with contextlib.ExitStack() as undo:
                undo.callback(step.close)
                step.join(further)
                undo.pop_all()
        return step
    job.together = {"ranks": ranks, "batch": batch, "timeout_s": timeout_s}
    with group.failing_together():
        target = job.target = share_fusing(group, target)
        reason = why_unmeasured(group, target.machine, target.exclude)
        if confirm:
            job.notes.append(
                f"plans were not measured: {reason}"
                if reason
                else "plans were measured in one process; between several, tensors take longer"
            )
        confirm = confirm and not reason
        found, best = None, None
        if group.rank == 0:
            with group.keeping_alive():
                found, (best, *_) = choose_alone()
        best = share_candidate(group, best, target, job.capture)
        return job.finish(found, [best], seed, verify)


def _check_options(of_capture: Mapping[str, Any]) -> None:
    """Refuse what `capture` does not take, before any work, as Python would."""
    known = inspect.signature(capture).parameters
    for name in of_capture:
        if name not in known:
            hint = did_you_mean(name, [*known, *inspect.signature(parallelize).parameters])
            raise TypeError(f"parallelize() got an unexpected keyword argument {name!r}.{hint}")


def _refuse_second(given: Mapping[str, Any]) -> None:
    """Refuse what a captured step has already; only the batch is given beside it."""
    nothing = {"micro_batches": 1, "example_kwargs": given.get("example_kwargs")}
    second = [name for name, value in given.items() if value != nothing.get(name)]
    if second:
        raise InputError(
            f"A captured step has its own {', '.join(second)}. Give them to dp.capture, or give "
            f"parallelize the model in its place."
        )


def _wants_shapes(shapes: Any, max_shapes: Any, model: Any, group: Group | None) -> bool:
    """Whether a step is to have further shapes; refuses them where it can have only one."""
    if isinstance(max_shapes, bool) or not isinstance(max_shapes, int) or max_shapes < 1:
        raise InputError(f"max_shapes must be a positive number, got {max_shapes!r}.")
    if not isinstance(shapes, (tuple, list)):
        raise InputError(
            f"shapes must be a list of batches, got {type(shapes).__name__}. For one more shape "
            f"give shapes=[batch]."
        )
    if max_shapes == 1 and not shapes:
        return False
    if 1 < max_shapes <= len(shapes):
        raise InputError(
            f"max_shapes must leave room for the example and all of shapes, which are "
            f"{1 + len(shapes)}, got {max_shapes}. Raise it, or give fewer shapes."
        )
    if isinstance(model, Captured):
        raise InputError(
            "A captured step has one shape. Give parallelize the model in its place, to plan it "
            "for further shapes."
        )
    if group is not None:
        raise InputError(
            "Several processes run a step of one shape: shapes and max_shapes are for one process. "
            "Pad the batches, or start one process."
        )
    return True


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        way = "To run a plan file, use dp.compile."
        if isinstance(model, torch.export.ExportedProgram):
            way = "Pass its module: exported.module()."
        raise InputError(f"parallelize needs a torch.nn.Module, got {type(model).__name__}. {way}")
    module = unwrap(model)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    name = next((name for name, tensor in tensors if tensor.is_meta), None)
    if name is not None:
        raise InputError(
            f"To run, the model needs values: {name!r} is on the meta device. Load weights (for "
            "example model.to_empty(device='cpu') and load_state_dict) first, or only plan with "
            "dp.place."
        )


def _counts(wanted: int | str, model: Any, job: Job) -> tuple[int, ...]:
    """Numbers of micro-batches to try."""
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1:
        return (wanted,)
    if wanted != "auto":
        raise InputError(f"micro_batches must be a positive number or 'auto', got {wanted!r}.")
    if len(job.target.devices) < 2:
        return (1,)
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    if any(isinstance(part, batch_norm) and part.training for part in model.modules()):
        job.notes.append(
            "only one micro-batch tried: batch norm takes its statistics over a whole batch"
        )
        return (1,)
    return MICRO_BATCHES
