"""Attention and blocks that the transformer workloads share."""
# mypy: allow-subclassing-any

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devplace.errors import InputError


@dataclass(frozen=True)
class BlockConfig:
    """Shape of one transformer block.

    Attributes:
        width: Features per token.
        heads: Attention heads; must divide the width.
        feed_forward: Features of the inner layer.
        dropout: On attention weights and on both branch outputs.
        causal: Whether a token sees only itself and what is before it.
        fused_attention: One `scaled_dot_product_attention`, or its parts as operations.
        pre_norm: Layer norm before each branch (GPT-2), or after each sum (BERT).
        norm_eps: Of the layer norms.
        gelu: `none` is the exact function, `tanh` its approximation.
    """

    width: int
    heads: int
    feed_forward: int
    dropout: float
    causal: bool
    fused_attention: bool
    pre_norm: bool
    norm_eps: float = 1e-5
    gelu: str = "none"


def check_lengths(seq: int, positions: int, width: int, heads: int) -> None:
    """Refuse more tokens than positions, and heads that do not divide the width."""
    if seq > positions:
        raise InputError(
            f"seq is {seq} tokens, but the model has {positions} positions. "
            "Lower seq or raise positions."
        )
    if width % heads:
        raise InputError(f"heads must divide width, got {heads} heads and width {width}.")


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence on itself.

    Query, key and value have a product each, which can be placed apart; released GPT-2 code
    computes the same numbers in one product.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map `[batch, seq, width]` to the same shape; `mask` is added to the scores."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        dropout = self.config.dropout if self.training else 0.0
        if self.config.fused_attention:
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.config.causal
            )
        else:
            weights = torch.softmax(self._scores(query, key, mask), -1)
            attended = F.dropout(weights, dropout, self.training) @ value
        return self.output(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """Split features by head. Shape `[batch, heads, seq, width/heads]`."""
        return x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Scaled products with what may not be seen at the lowest number."""
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if self.config.causal:
            seq = query.shape[-2]
            visible = torch.ones(seq, seq, dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        return scores if mask is None else scores + mask


class Block(nn.Module):
    """Self-attention and a feed-forward network, each with dropout, residual and layer norm."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, config.feed_forward),
            nn.GELU(config.gelu),
            nn.Linear(config.feed_forward, config.width),
        )
        self.feed_forward_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map `[batch, seq, width]` to the same shape."""
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), mask))
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
