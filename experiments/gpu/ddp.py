"""Data parallelism: `DistributedDataParallel` over NCCL, eager and compiled.

Run: `python -m experiments.gpu.ddp WORKLOAD --gpus 4 --number-format bf16 --out FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from experiments.gpu.training import WithLoss, fast_optimizer, shard, training_step
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from experiments.gpu.group import Group


def prepare(
    group: Group,
    compiled: bool = False,
    before_run: Callable[[], None] | None = None,
    mode: str = "default",
) -> Callable[[], Tensor]:
    """One training step on this process's part of the batch.

    Args:
        group: The processes.
        compiled: Compile the wrapped model; the compiler then splits the graph at the bucket
            boundaries, which excludes a static graph.
        before_run: Called between compiling and the first run.
        mode: Of the compiler.
    """
    workload = group.workload()
    model = WithLoss(group.settings, workload).to(group.device)
    inputs = shard(group.settings, workload.inputs, group.rank, group.world, group.device)
    parallel: Any = DistributedDataParallel(
        model,
        device_ids=[group.rank] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=not compiled,
    )
    if compiled:
        from experiments.gpu.compiled import compiled_with_pause

        assert before_run is not None
        parallel = compiled_with_pause(parallel, mode, before_run)

    def loss() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result: Tensor = parallel(*inputs)
        return result

    return training_step(loss, fast_optimizer(group.settings, model.parameters()))


if __name__ == "__main__":
    from experiments.gpu.group import main_of

    main_of("experiments.gpu.ddp", ["ddp", "ddp-compiled", "ddp-graphs"])
