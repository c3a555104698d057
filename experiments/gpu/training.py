"""The training step that all baselines run: workload, number format, optimizer."""
# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from devplace import workloads

LEARNING_RATE = 0.01
ADAM_LEARNING_RATE = (
    3e-4  # of models of this size: Brown et al. (2020), arXiv 2005.14165, table 2.1
)
OPTIMIZERS = ("sgd", "adamw")
FORMATS = ("tf32", "bf16")


@dataclass(frozen=True)
class Settings:
    """What is trained and how it is measured.

    Attributes:
        workload: Name of a built-in workload.
        number_format: `tf32`: fp32 with TF32 products; `bf16`: autocast, parameters in fp32.
        size: `full` or `small`.
        device: Where the model lies, or the first device of several.
        batch: Samples per step over all devices together; the workload's own if None.
        layers: Layers; the workload's own if None.
        dropout: The workload's own if None.
        seed: Of weights and inputs.
        seconds: Rough limit for all steps of one row.
        steps: Measured steps at most.
        gpus: Devices used.
        optimizer: `sgd` or `adamw`.
    """

    workload: str
    number_format: str = "tf32"
    size: str = "full"
    device: str = "cuda:0"
    batch: int | None = None
    layers: int | None = None
    dropout: float | None = None
    seed: int = 0
    seconds: float = 4.0
    steps: int = 20
    gpus: int = 1
    optimizer: str = "sgd"

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return str(torch.device(self.device).type)

    def devices(self) -> list[torch.device]:
        """The devices used, in order."""
        if self.device_type == "cpu":
            return [torch.device("cpu")]
        return [torch.device("cuda", k) for k in range(self.gpus)]


def prepare_torch(settings: Settings, rank: int = 0) -> None:
    """Let fp32 products and convolutions use TF32; seed the dropout of one of several processes."""
    torch.manual_seed(settings.seed + rank)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def autocast(settings: Settings) -> torch.autocast:
    """bf16 autocast, or a context that changes nothing."""
    enabled = settings.number_format == "bf16"
    return torch.autocast(settings.device_type, torch.bfloat16, enabled=enabled)


def build(settings: Settings, device: str | None = None) -> workloads.Workload:
    """The workload on `device`, by default where the settings say."""
    chosen = {"layers": settings.layers, "dropout": settings.dropout}
    changes = {key: value for key, value in chosen.items() if value is not None}
    return workloads.build(
        settings.workload,
        size=settings.size,
        batch=settings.batch,
        device=device or settings.device,
        seed=settings.seed,
        **changes,
    )


def bound_loss(
    settings: Settings, model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Any
) -> Callable[[], Tensor]:
    """The loss of one batch as a function without arguments, under autocast if asked for."""

    def loss() -> Tensor:
        with autocast(settings):
            return loss_fn(model, *inputs)

    return loss


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of most rows."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def make_optimizer(
    settings: Settings, parameters: Iterable[Tensor], **options: Any
) -> torch.optim.Optimizer:
    """The optimizer that the settings name, with torch's own options (`fused`, `capturable`)."""
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=ADAM_LEARNING_RATE, **options)
    options.pop("capturable", None)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, **options)


def fast_optimizer(settings: Settings, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The faster of torch's own implementations: AdamW in one kernel, SGD by default."""
    options = {"fused": True} if settings.optimizer == "adamw" else {}
    return make_optimizer(settings, parameters, **options)


def training_step(
    loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[], Tensor]:
    """Forward, backward and update; returns the loss."""

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


class WithLoss(nn.Module):
    """A model whose forward is the loss, for wrappers that hook `forward`."""

    def __init__(self, settings: Settings, workload: workloads.Workload) -> None:
        super().__init__()
        self.model = workload.model
        self._settings = settings
        self._loss_fn = workload.loss_fn

    def forward(self, *inputs: Tensor) -> Tensor:
        """The scalar loss of one batch."""
        with autocast(self._settings):
            return self._loss_fn(self.model, *inputs)


def shard(settings: Settings, inputs: Any, rank: int, world: int, device: Any) -> list[Tensor]:
    """The rank's equal part of a batch, on its device.

    Raises:
        ValueError: The batch cannot be divided evenly.
    """
    batch = inputs[0].shape[0]
    if batch % world:
        raise ValueError(f"a batch of {batch} cannot be divided evenly over {world} processes")
    size = batch // world
    return [tensor[rank * size : (rank + 1) * size].contiguous().to(device) for tensor in inputs]
