"""BERT pre-training on masked words: base and large."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from devplace.workloads.common import Built, init_transformer, random_ids, token_loss
from devplace.workloads.transformer import Block, BlockConfig, check_lengths

IGNORED = -100  # label of a token that is not to be predicted; torch's own default
MASKED_SHARE = 0.15  # Devlin et al. (2019), section 3.1
NORM_EPS = 1e-12  # released BERT code


@dataclass(frozen=True)
class BertConfig:
    """Sizes of BERT.

    Attributes:
        layers: Transformer blocks.
        width: Features per token.
        heads: Attention heads.
        feed_forward: Inner features of a block.
        batch: Sequences per step; 16 lets a large model train on one ordinary GPU.
        seq: Tokens per sequence; 128 as for nine tenths of the published pre-training.
        positions: Longest sequence the model can take.
        vocabulary: Word pieces.
        dropout: 0.1 as published; 0.0 turns it off.
        fused_attention: Attention as one operation instead of its parts.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    feed_forward: int = 3072
    batch: int = 16
    seq: int = 128
    positions: int = 512
    vocabulary: int = 30_522
    dropout: float = 0.1
    fused_attention: bool = False


_SMALL = BertConfig(width=16, heads=4, feed_forward=32, batch=4, seq=6, positions=8, vocabulary=50)
CONFIGS = {
    "bert-base": {"full": BertConfig(), "small": _SMALL},
    "bert-large": {
        "full": BertConfig(layers=24, width=1024, heads=16, feed_forward=4096),
        "small": replace(_SMALL, layers=24),
    },
}


class Bert(nn.Module):
    """Embeddings, blocks, and a masked-word head whose weights are those of the embedding.

    Source: Devlin et al. (2019), BERT, arXiv 1810.04805, sections 3 and A.2; differs from it in: no
    next-sentence task, and the head reads every position instead of the masked ones only.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.width
        block = BlockConfig(
            width,
            config.heads,
            config.feed_forward,
            config.dropout,
            causal=False,
            fused_attention=config.fused_attention,
            pre_norm=False,
            norm_eps=NORM_EPS,
        )
        self.word_embedding = nn.Embedding(config.vocabulary, width)
        self.position_embedding = nn.Embedding(config.positions, width)
        self.segment_embedding = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(block) for _ in range(config.layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, NORM_EPS))
        self.projection = nn.Linear(width, config.vocabulary)
        self.projection.weight = self.word_embedding.weight

    def forward(self, tokens: Tensor, attention_mask: Tensor, segments: Tensor) -> Tensor:
        """Logits `[batch, seq, vocabulary]`; all arguments are `[batch, seq]`, int64.

        Args:
            tokens: Word piece ids.
            attention_mask: 1 for a token, 0 for padding.
            segments: 0 for the first sentence, 1 for the second.
        """
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = self.word_embedding(tokens) + positions + self.segment_embedding(segments)
        x = self.dropout(self.norm(x))
        is_padding = 1.0 - attention_mask[:, None, None, :].to(x.dtype)
        mask = is_padding * torch.finfo(x.dtype).min
        for block in self.blocks:
            x = block(x, mask)
        return self.projection(self.head(x))


def random_sequences(config: BertConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, attention mask, segments and labels, each `[batch, seq]`, int64.

    Every second row is padded in its last quarter. Every row has the same number of labels, so that
    the mean over a batch is the mean over its micro-batches.
    """
    shape = (config.batch, config.seq)
    tokens = random_ids(config.vocabulary, *shape)
    column = torch.arange(config.seq)
    row = torch.arange(config.batch).unsqueeze(1)
    length = config.seq - (config.seq // 4) * (row % 2)
    attention_mask = (column < length).to(torch.int64)
    segments = (column >= length // 2).to(torch.int64)
    num_labels = max(1, round(MASKED_SHARE * config.seq))
    # Labels sit in the first three quarters, which no row pads.
    unpadded = config.seq - config.seq // 4
    chosen = torch.rand(config.batch, unpadded).topk(num_labels, 1).indices
    labels = torch.full(shape, IGNORED).scatter(1, chosen, tokens.gather(1, chosen))
    return tokens, attention_mask, segments, labels


def build(config: BertConfig) -> Built:
    """Model, random sequences with padding and labels, and the loss."""
    check_lengths(config.seq, config.positions, config.width, config.heads)
    return init_transformer(Bert(config)), random_sequences(config), token_loss
