"""From options to a problem: resolve the model, capture it, price it."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from devplace.cli.imported import fused_import, is_imported, read_graph, refuse_running
from devplace.cli.optimizers import make_optimizer, parse_optimizer
from devplace.cli.plan_files import PlanFiles, model_file
from devplace.cli.terminal import raw
from devplace.cli.trust import require_trust
from devplace.device_kinds import is_accelerator
from devplace.errors import CaptureError, InputError, PlanError
from devplace.files import why_unwritable
from devplace.placers.place import OBJECTIVES
from devplace.plan import Plan
from devplace.plan.plan import check_devices
from devplace.problem import Problem
from devplace.workloads.user import as_file

if TYPE_CHECKING:
    from devplace.auto.planning import Target
    from devplace.graph import Captured, OpGraph

AUTOCAST = ("bfloat16",)
_NOT_SAID = {"device": "cpu", "fuse": False, "stack_gradients": False, "uses_cpu": True}
"""What plans of before there was a choice were made with."""


@dataclass(frozen=True)
class Given:
    """What the user says beside a plan.

    Attributes:
        machine: In place of the plan's.
        model: In place of the plan's.
        is_trusted: Whether the Python file that the plan names may be run.
    """

    machine: str | None = None
    model: str | None = None
    is_trusted: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked to be planned.

    Attributes:
        model: Workload name, `file.py:function`, or an `.onnx` or `.pt2` file.
        machine: Preset, machine file, or `detect`.
        size: `small` or `full`.
        batch: Samples per step, or None.
        micro_batches: Chunks of the batch.
        batch_dims, compare_batches, clip_grad_norm: Of `capture`.
        autocast: Name of the dtype, one of `AUTOCAST`, or None.
        stack_gradients: Of `capture`; None: as `fuse`.
        fuse: Of `capture`; None: for GPUs that PyTorch's compiler makes kernels for.
        recompute: Whether the backward pass computes repeated blocks again, see `capture`.
        optimizer: As `parse_optimizer` takes it; means nothing for an inference.
        limits, pins, exclude: See `Problem`.
        uses_cpu: Of `parallelize`.
        device: torch device type to capture for; empty: `cuda` if the machine's GPUs are here.
        objective: One of `placers.OBJECTIVES`.
    """

    model: str
    machine: str
    size: str = "full"
    batch: int | None = None
    micro_batches: int = 1
    batch_dims: dict[str, int | None] = field(default_factory=dict)
    compare_batches: bool = True
    clip_grad_norm: float | None = None
    autocast: str | None = None
    stack_gradients: bool | None = None
    fuse: bool | None = None
    recompute: bool = False
    optimizer: str = "sgd"
    limits: dict[str, int | str] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    uses_cpu: bool = False
    device: str = ""
    objective: str = "latency"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(
                f"Unknown objective {self.objective!r}. Known: {', '.join(OBJECTIVES)}."
            )
        parse_optimizer(self.optimizer)
        if self.micro_batches < 1:
            raise InputError(f"--micro-batches must be at least 1, got {self.micro_batches}.")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise InputError(f"--clip-grad-norm must be positive, got {self.clip_grad_norm}.")
        if self.autocast is not None and self.autocast not in AUTOCAST:
            raise InputError(
                f"--autocast must be {' or '.join(AUTOCAST)}, got {self.autocast!r}. Training in "
                f"float16 needs loss scaling, which is not supported."
            )

    @classmethod
    def from_options(cls, values: dict[str, Any]) -> PlanRequest:
        """From the values of command-line options."""
        given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        dims = _pairs(values["batch_dim"], "--batch-dim", "mask=1 or mask=whole")
        given |= {
            "model": as_file(values["model"]),
            "batch_dims": {name: _dim(name, text) for name, text in dims.items()},
            "limits": _pairs(values["limit"], "--limit", "cuda:0=20GiB"),
            "pins": _pairs(values["pin"], "--pin", "encoder.*=cuda:1"),
            "exclude": tuple(values["exclude"]),
        }
        return cls(**given)

    @classmethod
    def from_plan(cls, plan: Plan, path: Path, given: Given) -> PlanRequest:
        """The request that the plan file at `path` was made with, its files as found from here.

        Raises:
            InputError: It names a Python file that the user has not said they trust.
            PlanError: The plan was not made by the command line, or a file it names is gone.
        """
        try:
            made = msgspec.convert({**_NOT_SAID, **plan.request}, cls)
            folder = msgspec.convert(plan.request.get("folder"), str | None)
        except msgspec.ValidationError as error:
            raise PlanError(
                f"The plan does not say how it was made ({error}). Only plans written by "
                f"`devplace plan` or `devplace compare` can be used here; make it again."
            ) from error
        found = PlanFiles(path, folder)
        machine = given.machine or found.machine(made.machine)
        if given.model is not None:
            return replace(made, machine=machine, model=as_file(given.model))
        model = found.model(made.model)
        require_trust(model, path, given.is_trusted)
        return replace(made, machine=machine, model=model)

    def files(self) -> tuple[Path, ...]:
        """The user's files it names: the model's and the machine's."""
        names = (model_file(self.model), self.machine)
        return tuple(Path(name) for name in names if os.path.isfile(name))


def check_output(what: str, output: Path, inputs: Iterable[Path] = ()) -> None:
    """A path that cannot or must not be written is told before the work, not after."""
    reason = why_unwritable(output)
    if reason:
        raise InputError(f"Cannot write {what} to {output}: {reason}. Give another output.")
    refuse_overwriting(output, inputs)


def refuse_overwriting(output: Path, inputs: Iterable[Path]) -> None:
    """An output must not replace a file that was just read."""
    for path in inputs:
        if os.path.realpath(output) == os.path.realpath(path):
            raise InputError(f"Writing to {output} would overwrite {path}. Give another output.")


def _dim(name: str, text: str) -> int | None:
    if text == "whole":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"--batch-dim {name!r} must be a dimension or 'whole', got {text!r}."
        ) from None


def _pairs(texts: Sequence[str], option: str, example: str) -> dict[str, str]:
    found = {}
    for text in texts:
        left, equals, right = text.rpartition("=")
        if not equals or not left or not right:
            raise InputError(f"{option} must look like {example}, got {text!r}.")
        if "=" in left:
            raise InputError(
                f"{option} takes one {example} at a time, got {text!r}. Repeat the option: "
                f"{option} {left.partition(',')[0]} {option} ...."
            )
        if left in found:
            raise InputError(f"{option} names {left!r} twice. Keep one.")
        found[left] = right
    return found


@dataclass(frozen=True)
class Session:
    """A captured and priced request."""

    request: PlanRequest
    workload: Any
    optimizer: Any
    problem: Problem


def open_session(
    request: PlanRequest, *, with_values: bool = False, confirms: bool = False
) -> Session:
    """Build the model, capture its training step and price it on the machine.

    Args:
        request: What is wanted.
        with_values: Give the model real weights, to run it; else it is on the meta device.
        confirms: Whether plans are to be run here before one is chosen.
    """
    from devplace.auto.planning import find_target

    if is_imported(request.model):
        request = _as_inference(request, with_values or confirms)
    with working("looking at the machine") as note:
        target = find_target(
            request.machine,
            request.limits,
            request.pins,
            request.exclude,
            uses_cpu=request.uses_cpu,
            runs=confirms,
            device=request.device,
            fuse=request.fuse,
            tell=note,
        )
    stacks = target.fuse if request.stack_gradients is None else request.stack_gradients
    request = replace(
        request,
        device=target.device,
        fuse=target.fuse,
        stack_gradients=stacks,
        exclude=target.exclude,
    )
    workload = optimizer = None
    if is_imported(request.model):
        with working("reading the graph"):
            graph = _imported(request)
    else:
        lies_on = "cpu" if with_values or confirms else "meta"
        workload, optimizer, graph = _capture(request, target, lies_on)
    with working("timing ops" if is_accelerator(target.device) else "pricing ops") as note:
        problem = target.problem(graph, tell=note)
    return Session(request, workload, optimizer, problem)


def _as_inference(request: PlanRequest, runs: bool) -> PlanRequest:
    """The request for a graph from a file, without what only training has."""
    if runs:
        refuse_running(request.model)
    training = {
        "--stack-gradients": request.stack_gradients,
        "--recompute": request.recompute,
        "--clip-grad-norm": request.clip_grad_norm,
        "--autocast": request.autocast,
    }
    for option, given in training.items():
        if given:
            raise InputError(f"{request.model} is an inference. Leave {option} out.")
    return replace(request, device="cpu", fuse=bool(request.fuse), stack_gradients=False)


def _imported(request: PlanRequest) -> OpGraph:
    graph = read_graph(request.model, request.batch, request.micro_batches, request.size)
    return fused_import(request.model, graph, request.pins) if request.fuse else graph


def _capture(request: PlanRequest, target: Target, lies_on: str) -> tuple[Any, Any, Captured]:
    with prints_on_stderr(), working("loading torch and the model") as note:
        workload, optimizer = build_model(request, lies_on)
        if request.recompute:
            _require_blocks(workload.model)
        note("capturing the step")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="micro_batches=")  # told below
            graph = target.capture(
                workload.model,
                workload.inputs,
                workload.loss_fn,
                optimizer,
                request.micro_batches,
                stack_gradients=request.stack_gradients,
                recompute=request.recompute,
                progress=lambda stage, count: note(f"{stage}: {count} nodes"),
                **capture_options(request),
            )
    if graph.meta.get("unchecked"):
        print(
            f"devplace: note: micro-batches were not compared with the whole batch: "
            f"{graph.meta['unchecked']}.",
            file=sys.stderr,
        )
    return workload, optimizer, graph


def _require_blocks(model: Any) -> None:
    """Refuse --recompute where `capture` would advise to name modules, which the option cannot."""
    from devplace.step_capture.rewrites.blocks import named_blocks

    try:
        named_blocks(model, True)
    except CaptureError as error:
        rule = str(error).partition(". ")[0]
        raise CaptureError(
            f"{rule}. Leave --recompute out; --micro-batches 4 takes less memory, too."
        ) from None


def build_model(request: PlanRequest, lies_on: str) -> tuple[Any, Any]:
    """The workload and its optimizer, which is None for an inference.

    Args:
        request: What is wanted.
        lies_on: `meta`, or the device of model and inputs.
    """
    from devplace import workloads

    workload = workloads.resolve(
        request.model, size=request.size, batch=request.batch, device=lies_on
    )
    return workload, None if workload.loss_fn is None else _optimizer(request, workload.model)


def capture_options(request: PlanRequest) -> dict[str, Any]:
    """What of a request goes to `capture` as it is."""
    import torch

    return {
        "batch_dims": request.batch_dims,
        "compare_batches": request.compare_batches,
        "clip_grad_norm": request.clip_grad_norm,
        "autocast": getattr(torch, request.autocast) if request.autocast else None,
        "name": request.model,
    }


def _optimizer(request: PlanRequest, model: Any) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError(
            f"Model {request.model!r} has no trainable parameters, so there is no training "
            f"step to plan. Give a model with parameters that require gradients, or return "
            f"(model, inputs) without a loss function to plan an inference."
        )
    return make_optimizer(request.optimizer, parameters)


@contextmanager
def prints_on_stderr() -> Iterator[None]:
    """What the user's code prints goes to stderr, also from C and from processes it starts: stdout
    is ours."""
    terminal = raw(sys.stderr)  # what it sends is its own
    with redirect_stdout(terminal), redirect_stderr(terminal), ExitStack() as undo:
        with suppress(OSError):  # one of the two is closed
            kept = os.dup(1)
            undo.callback(os.close, kept)
            os.dup2(2, 1)
            undo.callback(os.dup2, kept, 1)
            undo.callback(ctypes.CDLL(None).fflush, None)  # what C has still to write
        yield


def reopen(plan: Plan, path: Path, given: Given, *, with_values: bool = False) -> Session:
    """The session that the plan at `path` was made in, checked against the plan.

    Raises:
        InputError: The plan names a Python file that the user has not said they trust.
        PlanMismatchError: Model or machine has changed since.
    """
    from devplace.machine import load_machine

    request = PlanRequest.from_plan(plan, path, given)
    check_devices(plan, load_machine(request.machine))  # before its pins and limits are read
    session = open_session(request, with_values=with_values)
    plan.check(session.problem)
    return session


@contextmanager
def working(what: str) -> Iterator[Any]:
    """Show what is being done on stderr while it takes long; silent when that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from devplace.cli.console import console

    with console(on_stderr=True).status(what) as status:
        yield status.update
