"""Llama-style language model, 220 million parameters."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devplace.errors import InputError
from devplace.workloads.common import Built, init_transformer, random_ids, token_loss
from devplace.workloads.transformer import check_lengths

NORM_EPS = 1e-6  # released parameters of Llama 7B
ROTARY_BASE = 10_000.0  # Su et al. (2021), RoFormer, arXiv 2104.09864, section 3.2.2


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the language model.

    Attributes:
        layers: Blocks; 12 of width 1024, so that a step with Adam fits one ordinary GPU.
        width: Features per token.
        heads: Attention heads; each has an even number of features.
        feed_forward: Inner features of a block: 2/3 of four times the width, rounded up to a
            multiple of 256 as in the released code.
        batch: Sequences per step.
        seq: Tokens per sequence.
        positions: Longest sequence the model can take.
        vocabulary: Word pieces.
    """

    layers: int = 12
    width: int = 1024
    heads: int = 16
    feed_forward: int = 2816
    batch: int = 8
    seq: int = 512
    positions: int = 2048
    vocabulary: int = 32_000


_SMALL = LlamaConfig(width=16, heads=4, feed_forward=32, batch=4, seq=6, positions=8, vocabulary=50)
CONFIGS = {"llama": {"full": LlamaConfig(), "small": _SMALL}}


class RmsNorm(nn.Module):
    """Features divided by their root mean square, times a weight each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., width]` to the same shape; under autocast the mean is in float32."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * self.weight


class Attention(nn.Module):
    """Causal attention of heads turned by their position, without biases."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `[batch, seq, width]` to the same shape; angles are `[seq, width/heads/2]`."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = (rotated(each, cos, sin).to(value.dtype) for each in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward network, each behind a norm and with a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, inner = config.width, config.feed_forward
        self.attention_norm = RmsNorm(width)
        self.attention = Attention(config)
        self.feed_forward_norm = RmsNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `[batch, seq, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, blocks, a norm, and a head with weights of its own.

    Source: Touvron et al. (2023), LLaMA, arXiv 2302.13971, section 2.2, released code; differs from
    it in: fewer and narrower blocks, and a head's features turned in pairs of its first and second
    half instead of neighbours, which is another order of the same weights.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(config.vocabulary, config.width)
        cos, sin = rotary_angles(config.positions, config.width // config.heads)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.width)
        self.projection = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids `[batch, seq]` to logits `[batch, seq, vocabulary]`."""
        seq = tokens.shape[1]
        x = self.word_embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return self.projection(self.norm(x))


def rotary_angles(positions: int, features: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of how far each pair of features turns, each `[positions, features/2]`."""
    speed = ROTARY_BASE ** (-torch.arange(0, features, 2) / features)
    angles = torch.outer(torch.arange(positions), speed)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Features `[..., seq, features]` with pairs turned by angles `[seq, features/2]`."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def build(config: LlamaConfig) -> Built:
    """Model, random text with its successors, and the loss.

    Raises:
        InputError: More tokens than positions, or heads of an odd or broken number of features.
    """
    check_lengths(config.seq, config.positions, config.width, config.heads)
    if config.width // config.heads % 2:
        raise InputError(
            f"A head must have an even number of features, got {config.width // config.heads} "
            f"(width {config.width}, {config.heads} heads)."
        )
    text = random_ids(config.vocabulary, config.batch, config.seq + 1)
    inputs = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return init_transformer(Llama(config)), inputs, token_loss
