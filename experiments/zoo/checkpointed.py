"""Models with activation checkpointing, with and without dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from zoo.case import Case, floats, ints


class Block(nn.Module):
    """Attention and a feed-forward net, with dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.feed = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate)
        x = x + F.dropout(self.out(a.transpose(1, 2).flatten(2)), self.rate)
        return x + F.dropout(self.feed(x), self.rate)


class Net(nn.Module):
    """Blocks, each checkpointed."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rate) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def _net(rate: float) -> Case:
    batch = (floats(2, 5, 16), floats(2, 5, 16))
    return Case(Net(rate).double(), batch, _loss, draws=rate > 0)


def _sequential() -> Case:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()

    def loss(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(checkpoint_sequential(model, 2, x, use_reentrant=False), y)

    return Case(layers, (floats(6, 8), ints(8, 6)), loss)


def _hugging(name: str, rate: float) -> Case:
    from zoo import hugging

    case = hugging.cases()[name]()
    case.model.gradient_checkpointing_enable()  # type: ignore[operator]
    if rate:
        for module in case.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate
    return Case(case.model, case.inputs, case.loss_fn, draws=rate > 0)


CASES: dict[str, Callable[[], Case]] = {
    "attention": functools.partial(_net, 0.0),
    "attention_dropout": functools.partial(_net, 0.1),
    "sequential": _sequential,
    "llama": functools.partial(_hugging, "LlamaForCausalLM", 0.0),
    "gpt2_dropout": functools.partial(_hugging, "GPT2LMHeadModel", 0.1),
    "bert_dropout": functools.partial(_hugging, "BertForMaskedLM", 0.1),
    "vit": functools.partial(_hugging, "ViTForImageClassification", 0.0),
    "t5": functools.partial(_hugging, "T5ForConditionalGeneration", 0.0),
}
