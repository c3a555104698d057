"""Language model with mixture-of-experts layers: each expert can be placed by itself."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from devplace.errors import InputError
from devplace.workloads.common import Built, init_transformer, random_ids, token_cross_entropy
from devplace.workloads.transformer import BlockConfig, SelfAttention, check_lengths

BALANCE_WEIGHT = 0.01  # of the balance loss: Fedus et al. (2022), arXiv 2101.03961, section 2.2


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of the mixture-of-experts model; this project's choice.

    Attributes:
        layers: Blocks, each with attention and a mixture of experts.
        width: Features per token.
        heads: Attention heads.
        feed_forward: Inner features of an expert.
        experts: Experts per layer.
        experts_per_token: How many experts the gate gives a token to.
        capacity: Tokens an expert takes, relative to an even split.
        batch: Sequences per step.
        seq: Tokens per sequence.
        positions: Longest sequence the model can take.
        vocabulary: Word pieces.
        dropout: On attention weights; off by default.
        fused_attention: Attention as one operation instead of its parts.
    """

    layers: int = 4
    width: int = 512
    heads: int = 8
    feed_forward: int = 2048
    experts: int = 8
    experts_per_token: int = 2
    capacity: float = 1.25
    batch: int = 16
    seq: int = 128
    positions: int = 128
    vocabulary: int = 32_000
    dropout: float = 0.0
    fused_attention: bool = True


CONFIGS = {
    "moe": {
        "full": MoeConfig(),
        "small": MoeConfig(
            width=16, heads=4, feed_forward=32, batch=4, seq=6, positions=8, vocabulary=50
        ),
    }
}


class ExpertLayer(nn.Module):
    """A gate and feed-forward experts, each taking a fixed number of tokens.

    Source: Lepikhin et al. (2021), GShard, arXiv 2006.16668, section 2.2 (top-2 gating, capacity,
    balance loss); differs from it in: an expert takes the tokens that want it most, not the first
    ones, so that all shapes are fixed and tokens are sent by index.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.capacity = config.capacity
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(config.width, config.feed_forward),
                nn.GELU(),
                nn.Linear(config.feed_forward, config.width),
            )
            for _ in range(config.experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens `[tokens, width]` to the same shape and the balance loss (scalar)."""
        num_tokens, num_experts = x.shape[0], len(self.experts)
        even_share = self.experts_per_token * num_tokens / num_experts
        taken = max(1, min(num_tokens, int(self.capacity * even_share)))
        chances = torch.softmax(self.gate(x), -1)
        top_values, top_experts = chances.topk(self.experts_per_token, -1)
        weights = torch.zeros_like(chances).scatter(1, top_experts, top_values)
        chosen_share = (weights > 0).to(x.dtype).mean(0)
        balance = num_experts * (chosen_share * chances.mean(0)).sum()
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            weight, tokens = weights[:, index].topk(taken)
            output = expert(x.index_select(0, tokens)) * weight.unsqueeze(1)
            result = result.index_add(0, tokens, output)
        return result, balance


class MoeBlock(nn.Module):
    """Causal self-attention, then a mixture of experts, both residual."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        block = BlockConfig(
            config.width,
            config.heads,
            config.feed_forward,
            config.dropout,
            causal=True,
            fused_attention=config.fused_attention,
            pre_norm=True,
        )
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = SelfAttention(block)
        self.mixture_norm = nn.LayerNorm(config.width)
        self.mixture = ExpertLayer(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map `[batch, seq, width]` to the same shape and the balance loss."""
        x = x + self.attention(self.attention_norm(x))
        mixed, balance = self.mixture(self.mixture_norm(x).flatten(0, 1))
        return x + mixed.view_as(x), balance


class MixtureOfExperts(nn.Module):
    """Embeddings, blocks with experts, and a head of its own."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(MoeBlock(config) for _ in range(config.layers))
        self.projection = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[batch, seq, vocabulary]` of ids `[batch, seq]`, and the summed balance loss."""
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = self.word_embedding(tokens) + positions
        total = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return self.projection(x), total


def moe_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy per token plus 0.01 times the balance loss."""
    logits, balance = model(tokens)
    return token_cross_entropy(logits, targets) + BALANCE_WEIGHT * balance


def build(config: MoeConfig) -> Built:
    """Model, random text with its successors, and the loss."""
    check_lengths(config.seq, config.positions, config.width, config.heads)
    if config.experts_per_token > config.experts:
        raise InputError(
            f"experts_per_token is {config.experts_per_token}, but there are {config.experts} "
            "experts. Lower it or raise experts."
        )
    text = random_ids(config.vocabulary, config.batch, config.seq + 1)
    inputs = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return init_transformer(MixtureOfExperts(config)), inputs, moe_loss
