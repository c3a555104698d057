"""Compile or check a plan with its model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from devplace.errors import InputError, PlanMismatchError
from devplace.graph import Captured, OpGraph, as_captured
from devplace.graph.fusion import fuse_for
from devplace.graph.serialize import fingerprint
from devplace.kernels.prepare import prepare
from devplace.plan import Plan
from devplace.run.check import CheckReport, check_step
from devplace.run.compile import Step, alone, compile_step
from devplace.run.executors import Executor, make_executor, used_devices
from devplace.run.ranks.agreement import joined
from devplace.run.ranks.group import Group, several_processes
from devplace.schedule import make_schedule

_MADE_FOR = (
    "Capture the model, batch, loss and optimizer that it was made for, with the same "
    "micro_batches, batch_dims, clip_grad_norm, autocast, stack_gradients, fuse and recompute, or "
    "plan again."
)


def compile(
    captured: Captured,
    plan: Plan,
    *,
    model: Any = None,
    optimizer: Any = None,
    seed: int = 0,
    waits: bool = True,
    staged_pairs: frozenset[tuple[str, str]] = frozenset(),
    ranks: Mapping[str, int] | None = None,
    batch: str = "whole",
    timeout_s: float = 30.0,
) -> Step:
    """Make a planned step callable on the plan's devices: logical CPUs, or GPUs of this computer.

    Under `torchrun`, or in a process group of several processes, these run the step together: each
    captures it, calls this with the same plan, and drives some of the devices. Each holds what its
    devices do and no more. Weights are those of rank 0, every process calls the step and gets its
    result, and `sync` writes into the model of rank 0.

    Args:
        captured: The step that was planned, of `capture`; for a plan from a file, captured again in
            the same way. Fused groups are parted around the pins of the plan.
        plan: The plan.
        model, optimizer: In place of those that were captured, and just like them; the optimizer's
            present learning rates are used at every step.
        seed: Fixes all random numbers, whatever the placement.
        waits: Whether each step on GPUs is waited for; if not, a failure shows in a later call.
        staged_pairs: (sender, receiver) names of GPUs whose direct link is not to be used; their
            tensors go through host memory.
        ranks: Device name -> rank of the process that drives it; by default devices are split over
            the processes in order.
        batch: `whole`: each process is given all of the batch; `sharded`: its rows, an equal part
            of them, in the order of ranks.
        timeout_s: Of several processes: within so many seconds after one has died, hangs or failed,
            every other ends with an error that says so.

    Returns:
        A step: `loss = step(*batch)`, `step.sync()` writes back into model and optimizer.

    Raises:
        PlanMismatchError: The step, model or optimizer differs from what the plan was made for; or
            processes have another step, plan or torch.
        InputError: No plan, or no captured step; or more processes than devices.
        RankError: Another process failed, or did not come.
    """
    _check_plan(plan)
    check_batch_kind(batch)
    group = Group(timeout_s) if several_processes() else None
    with contextlib.nullcontext() if group is None else group.failing_together():
        found = _matching(captured, plan, "To compile a plan")
        return compile_step(
            found.model if model is None else model,
            found.optimizer if optimizer is None else optimizer,
            found,
            plan.placement,
            plan.order,
            plan.device_names,
            seed,
            waits=waits,
            predicted_bytes=plan.predicted.peak_bytes,
            staged_pairs=staged_pairs,
            join=alone if group is None else joined(group, seed, ranks, batch == "sharded"),
        )


def add_shape(
    step: Step, captured: Captured, plan: Plan, *, seed: int = 0, waits: bool = True
) -> None:
    """Let a step know another shape of batches; see `Step.add`.

    Args:
        step: Of `compile`.
        captured, plan: The step captured with such a batch, and its plan for the same machine.
        seed, waits: As of `compile`.

    Raises:
        PlanMismatchError: As of `compile` and `Step.add`.
        InputError: Several processes run the step.
    """
    _check_plan(plan)
    found = _matching(captured, plan, "To add a shape")

    def make() -> Executor:
        schedule = make_schedule(found, plan.placement, plan.order, plan.device_names)
        prepare(found, used_devices(schedule))
        peaks = plan.predicted.peak_bytes
        return make_executor(schedule, seed, waits=waits, predicted_bytes=peaks)

    step.add(found, make)


def check_batch_kind(batch: str) -> None:
    """Refuse what is no kind of batch of several processes."""
    if batch not in ("whole", "sharded"):
        raise InputError(f"batch must be 'whole' or 'sharded', got {batch!r}.")


def check(
    captured: Captured,
    plan: Plan,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    model: Any = None,
    optimizer: Any = None,
    steps: int = 3,
    seed: int = 0,
) -> CheckReport:
    """Run a plan beside the unplaced step and compare every result; see `check_step`.

    Args:
        captured, plan, model, optimizer: As of `compile`.
        inputs, kwargs: A batch, in a form that `capture` takes.
        steps: How many steps are compared.
        seed: Of the random ops.

    Raises:
        VerificationError: A result is off by more than its limit.
        PlanMismatchError: The step is not the plan's.
    """
    _check_plan(plan)
    found = _matching(captured, plan, "To check a plan")
    return check_step(
        found,
        found.model if model is None else model,
        found.optimizer if optimizer is None else optimizer,
        inputs,
        plan.placement,
        plan.order,
        plan.device_names,
        steps,
        seed,
        kwargs,
    )


def _matching(captured: OpGraph, plan: Plan, purpose: str) -> Captured:
    """The captured step, fused around the pins of the plan, which must be made for it."""
    found = fuse_for(as_captured(captured, purpose), plan.request.get("pins", {}))
    check_graph(plan, found)
    return found


def check_graph(plan: Plan, graph: OpGraph) -> None:
    """Refuse a graph the plan was not made for.

    Raises:
        PlanMismatchError: Says what differs.
        PlanError: The plan does not hang together.
    """
    if len(plan.ops) != len(graph.ops):
        raise PlanMismatchError(
            f"The plan was made for another step: it has {len(plan.ops)} ops, this one "
            f"{len(graph.ops)}. {_MADE_FOR}"
        )
    plan.as_placement()  # refuses one that was edited so that it does not hang together
    other = next((n for n, op in zip(plan.ops, graph.ops, strict=True) if n != op.name), None)
    if other is not None:
        raise PlanMismatchError(
            f"The plan was made for another step: its op {other!r} is not there. {_MADE_FOR}"
        )
    if plan.fingerprints.graph != fingerprint(graph):
        raise PlanMismatchError(
            f"The plan was made for another step: ops, shapes or dtypes differ. {_MADE_FOR}"
        )


def _check_plan(plan: Any) -> None:
    if isinstance(plan, Plan):
        return
    way = "Make one with dp.place, or load one with dp.load_plan"
    if isinstance(getattr(plan, "plan", None), Plan):
        way = "Give its plan: result.plan"
    elif isinstance(plan, (str, os.PathLike)):
        way = f"Load it: dp.load_plan({os.fspath(plan)!r})"
    raise InputError(f"A plan must be a dp.Plan, got {type(plan).__name__}. {way}.")
