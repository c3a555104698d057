"""BERT, GPT-2 and Llama cut into pipeline stages, by hand, between blocks."""
# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import torch
from experiments.gpu.training import Settings, autocast
from torch import Tensor, nn

from devplace.workloads.bert import Bert
from devplace.workloads.gpt import Gpt
from devplace.workloads.llama import Llama


class Stage(nn.Module):
    """Some blocks of a model; the first stage also embeds, the last one also gives logits."""

    def __init__(
        self, settings: Settings, model: Bert | Gpt | Llama, blocks: range, first: bool, last: bool
    ) -> None:
        super().__init__()
        self._settings = settings
        self.is_first = first
        self.is_last = last
        self.is_tied = not isinstance(model, Llama)
        self.blocks = nn.ModuleList(model.blocks[k] for k in blocks)
        if first:
            self.word_embedding = model.word_embedding
        if last:
            self.projection = model.projection

    def forward(self, *inputs: Tensor, **masks: Tensor) -> Tensor:
        """Hidden states `[batch, seq, width]`, or logits from the last stage."""
        with autocast(self._settings):
            x = self.embed(*inputs) if self.is_first else inputs[0]
            x = self.run_blocks(x, **masks)
            return self.logits(x) if self.is_last else x

    def embed(self, *inputs: Tensor) -> Tensor:
        """What enters the first block."""
        raise NotImplementedError

    def run_blocks(self, x: Tensor, **masks: Tensor) -> Tensor:
        """This stage's blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits `[batch, seq, vocabulary]`."""
        raise NotImplementedError


class BertStage(Stage):
    """Part of BERT; every stage gets the attention mask, only the first one tokens and segments."""

    def __init__(
        self, settings: Settings, model: Bert, blocks: range, first: bool, last: bool
    ) -> None:
        super().__init__(settings, model, blocks, first, last)
        if first:
            self.position_embedding = model.position_embedding
            self.dropout = model.dropout
            self.segment_embedding = model.segment_embedding
            self.norm = model.norm
        if last:
            self.head = model.head

    def embed(self, *inputs: Tensor) -> Tensor:
        """Sum of three embeddings, normalised."""
        tokens, segments = inputs
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = self.word_embedding(tokens) + positions + self.segment_embedding(segments)
        return self.dropout(self.norm(x))

    def run_blocks(self, x: Tensor, **masks: Tensor) -> Tensor:
        """This stage's blocks, which do not look at padding."""
        is_padding = 1.0 - masks["attention_mask"][:, None, None, :].to(x.dtype)
        mask = is_padding * torch.finfo(x.dtype).min
        for block in self.blocks:
            x = block(x, mask)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Masked-word head."""
        return self.projection(self.head(x))


class GptStage(Stage):
    """Part of GPT-2."""

    def __init__(
        self, settings: Settings, model: Gpt, blocks: range, first: bool, last: bool
    ) -> None:
        super().__init__(settings, model, blocks, first, last)
        if first:
            self.position_embedding = model.position_embedding
            self.dropout = model.dropout
        if last:
            self.norm = model.norm

    def embed(self, *inputs: Tensor) -> Tensor:
        """Sum of two embeddings."""
        (tokens,) = inputs
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.word_embedding(tokens) + self.position_embedding(positions))

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head."""
        return self.projection(self.norm(x))


class LlamaStage(Stage):
    """Part of Llama; every stage has the angles of all positions."""

    def __init__(
        self, settings: Settings, model: Llama, blocks: range, first: bool, last: bool
    ) -> None:
        super().__init__(settings, model, blocks, first, last)
        self.register_buffer("cos", model.cos.clone())
        self.register_buffer("sin", model.sin.clone())
        if last:
            self.norm = model.norm

    def embed(self, *inputs: Tensor) -> Tensor:
        """The embedding."""
        return self.word_embedding(inputs[0])

    def run_blocks(self, x: Tensor, **masks: Tensor) -> Tensor:
        """This stage's blocks, turned by the positions."""
        seq = x.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head."""
        return self.projection(self.norm(x))


def make_stage(settings: Settings, model: nn.Module, index: int, counts: list[int]) -> Stage:
    """Stage `index` of a model whose stages have `counts` blocks each.

    Raises:
        ValueError: The model is none of BERT, GPT-2 and Llama.
    """
    begin = sum(counts[:index])
    blocks = range(begin, begin + counts[index])
    ends = (index == 0, index == len(counts) - 1)
    if isinstance(model, Bert):
        return BertStage(settings, model, blocks, *ends)
    if isinstance(model, Gpt):
        return GptStage(settings, model, blocks, *ends)
    if isinstance(model, Llama):
        return LlamaStage(settings, model, blocks, *ends)
    raise ValueError(
        f"no stages are written for {type(model).__name__}; use bert-*, gpt-2 or llama"
    )


def head_in_blocks(model: Any) -> float:
    """Products of the logits relative to those of one block (attention scores not counted)."""
    block = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() > 1)
    return float(model.projection.weight.numel() / block)


def blocks_per_stage(num_blocks: int, owners: list[int], head: float) -> list[int]:
    """How many blocks each stage gets so that devices have about equal work.

    Args:
        num_blocks: Blocks in all.
        owners: Device of each stage.
        head: Work of the last stage beside its blocks, in blocks.

    Raises:
        ValueError: There are too few blocks: every stage but the last needs one.

    Example:
        >>> blocks_per_stage(12, [0, 1, 2, 3], 4.4)
        [4, 4, 4, 0]
        >>> blocks_per_stage(24, [0, 1, 2, 3], 2.5)
        [7, 7, 6, 4]
    """
    if num_blocks < len(owners) - 1:
        raise ValueError(f"{num_blocks} blocks are too few for {len(owners)} stages")
    counts = [1] * (len(owners) - 1) + [0]
    work = [float(owners[:-1].count(device)) for device in range(max(owners) + 1)]
    work[owners[-1]] += head
    for _ in range(num_blocks - sum(counts)):
        stage = min(range(len(owners)), key=lambda k: (work[owners[k]], counts[k], k))
        counts[stage] += 1
        work[owners[stage]] += 1
    return counts
