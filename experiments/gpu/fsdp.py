"""Sharded data parallelism: FSDP2's `fully_shard` on every block and on the rest.

Run: `python -m experiments.gpu.fsdp WORKLOAD --gpus 4 --number-format bf16 --out FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from experiments.gpu.training import WithLoss, fast_optimizer, shard, training_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from devplace.workloads import Workload
from devplace.workloads.common import token_cross_entropy

if TYPE_CHECKING:
    from experiments.gpu.group import Group


def prepare(group: Group, mixed: bool = False, compiled: bool = False) -> Callable[[], Tensor]:
    """One training step on this process's part of the batch.

    Args:
        group: The processes.
        mixed: Gather parameters in bf16, reduce gradients in fp32, and keep a block's parameters
            from forward to backward: less traffic for more memory. Otherwise parameters travel in
            fp32, twice a step, and the number format is autocast alone.
        compiled: Compile every block before it is sharded, and the loss, as torchtitan does.
    """
    workload = group.workload()
    if compiled:
        workload = with_compiled_parts(workload)
    model = WithLoss(group.settings, workload).to(group.device)
    mesh = init_device_mesh(group.device.type, (group.world,))
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not mixed)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not mixed)
    inputs = shard(group.settings, workload.inputs, group.rank, group.world, group.device)
    return training_step(lambda: model(*inputs), fast_optimizer(group.settings, model.parameters()))


def with_compiled_parts(workload: Workload) -> Workload:
    """A workload whose blocks and loss are compiled, all else as it was."""
    blocks = cast(nn.ModuleList, workload.model.blocks)
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, dynamic=False)
    loss = compiled_loss()

    def loss_fn(model: nn.Module, *inputs: Tensor) -> Tensor:
        *arguments, targets = inputs
        return loss(model(*arguments), targets)

    return Workload(workload.name, workload.model, workload.inputs, loss_fn)


def compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """Mean cross entropy of logits against ids, compiled."""
    return torch.compile(token_cross_entropy, dynamic=False)


if __name__ == "__main__":
    from experiments.gpu.group import main_of

    main_of("experiments.gpu.fsdp", ["fsdp", "fsdp-mixed", "fsdp-compiled", "fsdp-mixed-compiled"])
