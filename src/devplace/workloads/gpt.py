"""GPT-2 language model, 124 million parameters."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from devplace.workloads.common import Built, init_transformer, random_ids, token_loss
from devplace.workloads.transformer import Block, BlockConfig, check_lengths


@dataclass(frozen=True)
class GptConfig:
    """Sizes of GPT-2.

    Attributes:
        layers: Transformer blocks.
        width: Features per token; the inner layer of a block has four times as many.
        heads: Attention heads.
        batch: Sequences per step; 8 lets the step fit one ordinary GPU.
        seq: Tokens per sequence.
        positions: Longest sequence the model can take.
        vocabulary: Word pieces.
        dropout: 0.1 as released; 0.0 turns it off.
        fused_attention: Attention as one operation instead of its parts.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    batch: int = 8
    seq: int = 1024
    positions: int = 1024
    vocabulary: int = 50_257
    dropout: float = 0.1
    fused_attention: bool = True


CONFIGS = {
    "gpt-2": {
        "full": GptConfig(),
        "small": GptConfig(width=16, heads=4, batch=4, seq=6, positions=8, vocabulary=50),
    }
}


class Gpt(nn.Module):
    """Embeddings, causal blocks, and a head whose weights are those of the embedding.

    Source: Radford et al. (2019), Language Models are Unsupervised Multitask Learners, section 2.3
    and table 2, released code; differs from it in: separate products for query, key and value, and
    no extra scaling of the initial residual weights.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        block = BlockConfig(
            width,
            config.heads,
            4 * width,
            config.dropout,
            causal=True,
            fused_attention=config.fused_attention,
            pre_norm=True,
            gelu="tanh",
        )
        self.word_embedding = nn.Embedding(config.vocabulary, width)
        self.position_embedding = nn.Embedding(config.positions, width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(block) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, config.vocabulary, bias=False)
        self.projection.weight = self.word_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids `[batch, seq]` to logits `[batch, seq, vocabulary]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.word_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.projection(self.norm(x))


def build(config: GptConfig) -> Built:
    """Model, random text with its successors, and the loss."""
    check_lengths(config.seq, config.positions, config.width, config.heads)
    text = random_ids(config.vocabulary, config.batch, config.seq + 1)
    inputs = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return init_transformer(Gpt(config)), inputs, token_loss
