"""What the report of a step says beside its times."""

from __future__ import annotations

from devplace.device_kinds import is_host
from devplace.graph import Captured
from devplace.machine.detect import num_cores
from devplace.plan import Plan

_BATCH_NORM = "aten._native_batch_norm_legit_functional"  # of training
WORTH_STACKING = 20
"""Products spared from which on the report speaks of it."""


def step_notes(graph: Captured, plan: Plan) -> tuple[str, ...]:
    """All notes on a step and the plan it runs."""
    return (
        *few_cores(plan),
        *no_optimizer(graph),
        *in_eval_mode(graph),
        *could_stack(graph),
        *in_chunks(graph),
    )


def few_cores(plan: Plan) -> tuple[str, ...]:
    """A note where a plan has more GPUs than this process has cores to feed them; else nothing."""
    used = {plan.device_names[device] for device in plan.placement}
    gpus, cores = sum(not is_host(name) for name in used), num_cores()
    if gpus <= cores:
        return ()
    return (
        f"each of {gpus} GPUs is fed by a thread of its own, but this process may use {cores} "
        f"core{'s' if cores > 1 else ''}: GPUs may run dry. Give it a core for each GPU",
    )


def no_optimizer(graph: Captured) -> tuple[str, ...]:
    """A note where a loss was given and no optimizer, and the model is in training mode."""
    if graph.meta["mode"] != "eval-loss" or not graph.meta["training"]:
        return ()
    return (
        "no optimizer was given, so the step gives the loss and trains nothing. To train, give "
        "an optimizer; to evaluate, call model.eval() first",
    )


def in_eval_mode(graph: Captured) -> tuple[str, ...]:
    """A note where a model in eval mode is trained, as it is asked; else nothing."""
    if graph.meta["mode"] != "train" or graph.meta["training"]:
        return ()
    return (
        "the model is trained in eval mode, as it was given: no dropout, and batch norm uses its "
        "running statistics. If that is not meant, call model.train() first",
    )


def could_stack(graph: Captured) -> tuple[str, ...]:
    """A note where many products of weights' gradients could be made at once; else nothing."""
    spared = int(graph.meta.get("spared_by_stacking", 0))
    if spared < WORTH_STACKING:
        return ()
    return (
        f"weights are used many times in a step: stack_gradients=True computes their gradients by "
        f"{spared} products of matrices fewer, rounded in another order than torch's. On one H200 "
        f"that made steps of unrolled LSTM models 1.6 to 1.9 times as fast",
    )


def in_chunks(graph: Captured) -> tuple[str, ...]:
    """Notes on what micro-batches may have other than the whole batch."""
    notes = []
    if graph.meta.get("unchecked"):
        notes.append(
            f"micro-batches were not compared with the whole batch: {graph.meta['unchecked']}"
        )
    has_statistics = any(op.target.startswith(_BATCH_NORM) for op in graph.ops)
    if int(graph.meta.get("micro_batches", 1)) > 1 and has_statistics:
        notes.append("batch norm takes its statistics over each micro-batch, not the whole batch")
    return tuple(notes)
