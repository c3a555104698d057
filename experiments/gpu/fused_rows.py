"""What is trained in each row of the comparison of fused steps, the same for all who train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.gpu.training import Settings

GROUP_PEERS = ("ddp", "fsdp", "pipeline")


@dataclass(frozen=True)
class Row:
    """A model with its batch, number format and optimizer.

    Attributes:
        workload: Name of a built-in workload.
        number_format: `tf32` or `bf16`, see `Settings`.
        batch: Samples per step, over all GPUs together.
        optimizer: `sgd` as in the other tables, or `adamw`.
        micro_batches: Numbers of micro-batches that our plans for several GPUs try.
        peers: Who else runs it on several GPUs.
    """

    workload: str
    number_format: str
    batch: int
    optimizer: str = "sgd"
    micro_batches: tuple[int, ...] = (1,)
    peers: tuple[str, ...] = ()

    def settings(self, options: Any, gpus: int = 1) -> Settings:
        """The row as settings of the other experiments; a small one keeps its own batch."""
        return Settings(
            self.workload,
            number_format=self.number_format,
            size=options.size,
            device=options.device,
            batch=self.batch if options.size == "full" else None,
            layers=options.layers,
            seed=options.seed,
            seconds=options.seconds,
            steps=options.steps,
            gpus=gpus,
            optimizer=self.optimizer,
        )


def _transformer(workload: str, batch: int, optimizer: str = "sgd") -> Row:
    return Row(workload, "bf16", batch, optimizer, (1, 2), GROUP_PEERS)


ROWS = {
    "bert-large-32": _transformer("bert-large", 32),
    "gpt-2-32": _transformer("gpt-2", 32),
    "gpt-2-8": Row("gpt-2", "bf16", 8),
    "resnet-50": Row("resnet-50", "tf32", 32),
    "nmt-4": Row("nmt-4", "tf32", 64),
    "gnmt-4": Row("gnmt-4", "tf32", 64),
    "llama": _transformer("llama", 8, "adamw"),
    "vit-b-16": Row("vit-b-16", "bf16", 64),
    "bert-large-16": Row("bert-large", "bf16", 16),
    "gpt-2-8-tf32": Row("gpt-2", "tf32", 8),
    "rnnlm": Row("rnnlm", "tf32", 64),
    "nmt-2": Row("nmt-2", "tf32", 64),
    "nmt-8": Row("nmt-8", "tf32", 64),
    "inception-v3": Row("inception-v3", "tf32", 32),
}
"""Name -> row, the most telling first."""

TRIED = {
    "ddp": ("ddp-compiled", "ddp-graphs"),
    "fsdp": ("fsdp-compiled", "fsdp-mixed-compiled"),
    "pipeline": ("1f1b-2-compiled", "1f1b-4-compiled"),
}
"""Peer on several GPUs -> rows of `experiments.gpu.group`; the best counts."""
