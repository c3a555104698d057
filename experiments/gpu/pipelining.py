"""Pipeline parallelism: `torch.distributed.pipelining` with 1F1B and zero-bubble schedules.

Run: `python -m experiments.gpu.pipelining WORKLOAD --gpus 4 --number-format bf16 --out FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from experiments.gpu.fsdp import compiled_loss
from experiments.gpu.stages import blocks_per_stage, head_in_blocks, make_stage
from experiments.gpu.training import autocast, fast_optimizer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from devplace.workloads.bert import Bert
from devplace.workloads.common import token_cross_entropy

if TYPE_CHECKING:
    from experiments.gpu.group import Group


def owners_of(schedule: str, world: int) -> list[int]:
    """Rank of each stage: one stage a rank, two in a loop, or two in a V."""
    ranks = list(range(world))
    return {"1f1b": ranks, "zero-bubble": ranks * 2, "zbv": ranks + ranks[::-1]}[schedule]


def prepare(
    group: Group,
    schedule: str,
    micro_batches: int,
    compiled: bool = False,
) -> Callable[[], Tensor]:
    """One training step of the whole batch; the loss is on the rank of the last stage.

    Args:
        group: The processes.
        schedule: `1f1b`, `zero-bubble` (interleaved, two stages a rank) or `zbv`.
        micro_batches: Equal parts of the batch.
        compiled: Compile every stage and the loss; not for schedules that divide the backward
            pass of a stage, which a compiled one does not let them do.
    """
    workload = group.workload()
    owners = owners_of(schedule, group.world)
    counts = blocks_per_stage(len(workload.model.blocks), owners, head_in_blocks(workload.model))
    mine = [index for index, owner in enumerate(owners) if owner == group.rank]
    parts = [make_stage(group.settings, workload.model, k, counts) for k in mine]
    for part in parts:
        # In place, so that the word embedding that two stages of one rank share stays one.
        part.to(group.device)
    whole = [torch.compile(part, dynamic=False) for part in parts] if compiled else parts
    stages: list[Any] = [
        PipelineStage(cast(nn.Module, part), index, len(owners), group.device)
        for part, index in zip(whole, mine, strict=True)
    ]
    for stage in stages:
        # A compiler may pad rows of the logits: torch refuses their strides, which nothing reads.
        if stage.is_last and hasattr(stage, "_validate_fwd_outputs"):
            stage._validate_fwd_outputs = lambda outputs: None
    loss = compiled_loss() if compiled else token_cross_entropy
    inputs = [tensor.to(group.device) for tensor in workload.inputs]
    run = _runner(
        group, schedule, micro_batches, stages, isinstance(workload.model, Bert), inputs, loss
    )
    tied = tied_weight(parts)
    ends = sorted({owners[0], owners[-1]})
    pair = dist.new_group(ends) if len(ends) == 2 else None
    parameters = {id(p): p for part in parts for p in part.parameters()}
    optimizer = fast_optimizer(group.settings, parameters.values())

    def step() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        run(losses)
        if pair is not None and tied is not None:
            dist.all_reduce(tied.grad, group=pair)
        optimizer.step()
        return torch.stack(losses).sum().detach() if losses else torch.tensor(float("nan"))

    return step


def tied_weight(parts: list[Any]) -> nn.Parameter | None:
    """The word embedding if this rank has it and first and last stage use one and the same."""
    for part in parts:
        if not part.is_tied:
            return None
        if part.is_first:
            return part.word_embedding.weight
        if part.is_last:
            return part.projection.weight
    return None


def _runner(
    group: Group,
    name: str,
    micro_batches: int,
    stages: list[Any],
    is_bert: bool,
    inputs: Any,
    loss: Any,
) -> Callable[[list[Tensor]], None]:
    """Forward and backward of all micro-batches by a schedule, adding the losses to a list."""

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        # Divided here: `scale_grads` would divide a weight that two stages share twice.
        with autocast(group.settings):
            return cast(Tensor, loss(logits, targets)) / micro_batches

    schedule: Any
    if name == "1f1b":
        schedule = Schedule1F1B(stages[0], micro_batches, loss_fn, scale_grads=False)
    else:
        kind = ScheduleZBVZeroBubble if name == "zbv" else ScheduleInterleavedZeroBubble
        schedule = kind(stages, micro_batches, loss_fn, scale_grads=False)
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)
    tokens, targets = inputs[0], inputs[-1]
    arguments = ((tokens, inputs[2]) if is_bert else (tokens,)) if first else ()
    masks = {"attention_mask": inputs[1]} if is_bert else {}

    def run(losses: list[Tensor]) -> None:
        target = targets if last else None
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False, **masks)

    return run


if __name__ == "__main__":
    from experiments.gpu.group import ROWS, main_of

    names = [name for name, (module, _) in ROWS.items() if module == "pipelining"]
    main_of("experiments.gpu.pipelining", names)
