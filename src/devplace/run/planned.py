"""Compile or check a plan with its model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from devplace.errors import InputError, PlanMismatchError
from devplace.graph import OpGraph
from devplace.graph.fusion import fuse_for
from devplace.graph.serialize import fingerprint
from devplace.plan import Plan
from devplace.run.check import CheckReport, check
from devplace.run.compile import Step, compile_step

_MADE_FOR = (
    "Give the model, batch, loss, optimizer, micro_batches, batch_dims, clip_grad_norm, autocast, "
    "stack_gradients and fuse that it was made for, or plan again."
)


def compile(
    model: Any,
    plan: Plan,
    *,
    optimizer: Any = None,
    graph: OpGraph | None = None,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    micro_batches: int = 1,
    batch_dims: Mapping[Any, int | None] | None = None,
    compare_batches: bool = True,
    clip_grad_norm: float | None = None,
    autocast: Any = None,
    stack_gradients: bool | None = None,
    fuse: bool = False,
    stack_inputs: bool = False,
    seed: int = 0,
    waits: bool = True,
    staged_pairs: frozenset[tuple[str, str]] = frozenset(),
) -> Step:
    """Make a planned step callable on the plan's devices: logical CPUs, or GPUs of this computer.

    Args:
        model: The model the plan was made for.
        plan: The plan; in the process that made it, nothing more is needed.
        optimizer: The optimizer of the model; its present learning rates are used at every step.
            Default: the one given to `capture`.
        graph: The captured step. Default: the plan's own, or a new capture.
        example_inputs, example_kwargs, loss_fn, micro_batches: As given to `capture`, to capture
            again: for a plan from a file, or for another loss function or other options than those
            of the plan's own graph.
        batch_dims, compare_batches: Likewise.
        clip_grad_norm, autocast, stack_gradients, fuse, stack_inputs: Likewise.
        seed: Fixes all random numbers, whatever the placement.
        waits: Whether each step on GPUs is waited for; if not, a failure shows in a later call.
        staged_pairs: (sender, receiver) names of GPUs whose direct link is not to be used; their
            tensors go through host memory.

    Returns:
        A step: `loss = step(*batch)`, `step.sync()` writes back into model and optimizer.

    Raises:
        PlanMismatchError: The model, batch or optimizer differs from what the plan was made for.
        InputError: No plan, or nothing to run: the step must be captured, and no example inputs
            were given.
    """
    _check_plan(plan)
    found = graph or (plan.problem.graph if plan.problem is not None else None)
    if optimizer is None and found is not None and found.program is not None:
        optimizer = found.program.optimizer
    options: dict[str, Any] = {
        "clip_grad_norm": clip_grad_norm,
        "autocast": autocast,
        "stack_gradients": stack_gradients,
        "fuse": fuse,
        "stack_inputs": stack_inputs,
    }
    if graph is None and found is not None and _is_other(found, loss_fn, options):
        found = None
    if found is None or found.program is None:
        options |= {"batch_dims": batch_dims, "compare_batches": compare_batches}
        found = _capture_again(
            model, example_inputs, example_kwargs, loss_fn, optimizer, micro_batches, options
        )
        found = fuse_for(found, plan.request.get("pins", {}))
    check_graph(plan, found)
    return compile_step(
        model,
        optimizer,
        found,
        plan.placement,
        plan.order,
        plan.device_names,
        seed,
        waits=waits,
        predicted_bytes=plan.predicted.peak_bytes,
        staged_pairs=staged_pairs,
    )


def check_plan(
    plan: Plan,
    graph: OpGraph,
    model: Any,
    optimizer: Any,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    steps: int = 3,
    seed: int = 0,
) -> CheckReport:
    """Run a plan beside the unplaced step and compare every result; see `check`.

    Raises:
        VerificationError: A result is off by more than its limit.
        PlanMismatchError: The graph is not the plan's.
    """
    check_graph(plan, graph)
    return check(
        graph,
        model,
        optimizer,
        inputs,
        plan.placement,
        plan.order,
        plan.device_names,
        steps,
        seed,
        kwargs,
    )


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


def _is_other(graph: OpGraph, loss_fn: Any, options: Mapping[str, Any]) -> bool:
    """Whether a graph was captured with another loss function or other options than are given."""
    program = graph.program
    is_other_loss = loss_fn is not None and program is not None and program.loss_fn != loss_fn
    named = {key: str(value).removeprefix("torch.") for key, value in options.items() if value}
    return is_other_loss or any(str(graph.meta.get(k)) != value for k, value in named.items())


def _capture_again(
    model: Any,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    micro_batches: int,
    options: Mapping[str, Any],
) -> OpGraph:
    from devplace.step_capture import capture

    if not isinstance(example_inputs, tuple) or example_inputs or example_kwargs:
        return capture(
            model,
            example_inputs,
            loss_fn,
            optimizer,
            micro_batches,
            example_kwargs=example_kwargs,
            **options,
        )
    raise InputError(
        "The step must be captured again, as the plan is from a file or was made with another loss "
        "function, clipping or autocast: give example_inputs, and loss_fn and optimizer as they "
        "were when it was made."
    )
