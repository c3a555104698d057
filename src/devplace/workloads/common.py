"""What several workloads share: losses, random batches, unrolled LSTM cells, initial weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LossFunction = Callable[..., Any]
Built = tuple[nn.Module, tuple[Tensor, ...], LossFunction]
State = tuple[Tensor, Tensor]


def random_images(batch: int, image: int) -> Tensor:
    """Normal pixels. Shape `[batch, 3, image, image]`."""
    return torch.randn(batch, 3, image, image)


def random_ids(count: int, *shape: int) -> Tensor:
    """Class or token ids, uniform in `0 .. count-1`, int64."""
    return torch.randint(count, shape)


def class_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of an image classifier."""
    return F.cross_entropy(model(images), labels)


def token_loss(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Mean cross entropy per token; the last input holds the target ids (-100: not counted)."""
    *arguments, targets = inputs
    return token_cross_entropy(model(*arguments), targets)


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits `[batch, steps, vocabulary]` against ids `[batch, steps]`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def embedded_steps(embedding: nn.Module, tokens: Tensor) -> tuple[Tensor, ...]:
    """Embedded tokens of each time step, each `[batch, hidden]`.

    One lookup for all steps: a lookup per step would make, in the backward pass, one dense gradient
    of the whole vocabulary per step and add them all.
    """
    return tuple(embedding(tokens).unbind(1))


def zero_state(like: Tensor, hidden: int) -> State:
    """Hidden and cell state of an LSTM before the first step, each `[batch, hidden]`."""
    batch = like.shape[0]
    return like.new_zeros(batch, hidden), like.new_zeros(batch, hidden)


def init_transformer(model: nn.Module) -> nn.Module:
    """Normal weights of deviation 0.02 and zero biases, in place.

    Source: Devlin et al. (2019), BERT, released code; Radford et al. (2019), GPT-2, released code.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model
