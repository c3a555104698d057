"""The request for a capture, and the inputs and outputs of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from devplace.graph.graph import ResultRole
from devplace.graph.program import BindingKind
from devplace.step_capture.batch import Batch
from devplace.step_capture.micro_batches.chunk_loss import Whole
from devplace.step_capture.optimizers.rules import Update
from devplace.step_capture.sources import Sources


@dataclass(frozen=True)
class Input:
    """One flat input of the step: see `Binding`."""

    kind: BindingKind
    key: str
    slot: str | int = ""


@dataclass(frozen=True)
class Output:
    """One flat output of the step; `replaces` is the flat input it takes the place of, or -1."""

    role: ResultRole | str
    name: str
    replaces: int = -1


@dataclass(frozen=True)
class CaptureRequest:
    """What is to be captured.

    Attributes:
        model: The module.
        call: Function of the batch to what the loss function (or the model) returns.
        sources: The model's parameters and buffers.
        batch: The flattened example batch.
        mode: `train`, `eval-loss` or `inference`.
        update: The optimizer, for training.
        clip_grad_norm: Largest global 2-norm of the gradients, if they are clipped.
        autocast: Low-precision dtype of the forward pass, if any.
        device_type: torch device type to capture for.
        optimizer: The user's optimizer, kept for the program.
        loss_fn: As the user gave it.
        adds_up: Whether the loss of the batch is the sum of those of its chunks, not their mean.
        stack_gradients: Whether products of a weight's gradient are stacked.
        fuse: Whether the step is made ready to be fused.
        stack_inputs: Whether products of inputs with one weight are made one.
        recompute: Names of modules that the backward pass computes again.
        has_gradients: Whether operations can be differentiated: in training, and where the model
            itself takes derivatives by its inputs.
        whole: Of micro-batches, what the step of the whole batch says.
        is_compared: Whether the step also gives what micro-batches are compared by (`Step.extra`).
        compares_batches: Whether micro-batches must compute what the whole batch does.
        copies_batches: Whether micro-batches may be copied from others of their size.
    """

    model: torch.nn.Module
    call: Callable[..., Any]
    sources: Sources
    batch: Batch
    mode: str
    update: Update | None = None
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    device_type: str = "cpu"
    optimizer: Any = None
    loss_fn: Any = None
    adds_up: bool = False
    stack_gradients: bool = False
    fuse: bool = False
    stack_inputs: bool = False
    has_gradients: bool = False
    whole: Whole = field(default_factory=Whole)
    is_compared: bool = False
    compares_batches: bool = True
    copies_batches: bool = True
    recompute: tuple[str, ...] = ()


def source_name(entry: Input) -> str:
    """Name of the source op of an input of the step."""
    if entry.kind in ("parameter", "buffer"):
        return entry.key
    if entry.kind == "state":
        return f"{entry.slot}[{entry.key}]"
    return f"{entry.kind}[{entry.key}]"
