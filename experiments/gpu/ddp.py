"""Data parallelism: `DistributedDataParallel` over NCCL, eager and compiled.

Run: `python -m experiments.gpu.ddp WORKLOAD --gpus 4 --number-format bf16 --out FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from experiments.gpu.training import WithLoss, sgd, shard, training_step
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from experiments.gpu.group import Group


def prepare(
    group: Group, compiled: bool = False, before_run: Callable[[], None] | None = None
) -> Callable[[], Tensor]:
    """One training step on this process's part of the batch.

    Args:
        group: The processes.
        compiled: Compile the wrapped model (default mode); the compiler then splits the graph at
            the bucket boundaries, which excludes a static graph.
        before_run: Called between compiling and the first run.
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
        parallel = compiled_with_pause(parallel, "default", before_run)
    return training_step(lambda: parallel(*inputs), sgd(model))


if __name__ == "__main__":
    from experiments.gpu.group import main_of

    main_of("experiments.gpu.ddp", ["ddp", "ddp-compiled"])
