"""Recurrent language model, unrolled in time."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from devplace.workloads.common import Built, embedded_steps, random_ids, token_loss, zero_state


@dataclass(frozen=True)
class RnnlmConfig:
    """Sizes of the language model.

    Attributes:
        layers: LSTM layers.
        hidden: Units per layer and size of the embedding.
        batch: Sentences per step; 64 as commonly reported for Mirhoseini et al. (2017).
        seq: Time steps.
        vocabulary: Words.
        dropout: On what enters and leaves a layer; off by default.
    """

    layers: int = 2
    hidden: int = 2048
    batch: int = 64
    seq: int = 35
    vocabulary: int = 10_000
    dropout: float = 0.0


CONFIGS = {
    "rnnlm": {
        "full": RnnlmConfig(),
        "small": RnnlmConfig(hidden=16, batch=4, seq=6, vocabulary=50),
    }
}


class Rnnlm(nn.Module):
    """Embedding, stacked LSTM cells called once per time step, one softmax layer over all steps.

    Source: Zaremba et al. (2014), Recurrent Neural Network Regularization, arXiv 1409.2329 (35
    steps, 10,000 words of Penn Treebank), as placed by Mirhoseini et al. (2017), arXiv 1706.04972;
    differs from it in: 2048 units, which the placement papers' own size was not checked against.
    """

    def __init__(self, config: RnnlmConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.hidden = hidden
        self.embedding = nn.Embedding(config.vocabulary, hidden)
        self.cells = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)
        self.projection = nn.Linear(hidden, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids `[batch, seq]` to logits `[batch, seq, vocabulary]`."""
        steps = embedded_steps(self.embedding, tokens)
        states = [zero_state(steps[0], self.hidden) for _ in self.cells]
        outputs = []
        for step in steps:
            x = self.dropout(step)
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = self.dropout(states[layer][0])
            outputs.append(x)
        return self.projection(torch.stack(outputs, 1))


def build(config: RnnlmConfig) -> Built:
    """Model, random words with their successors, and the loss."""
    text = random_ids(config.vocabulary, config.batch, config.seq + 1)
    return Rnnlm(config), (text[:, :-1].contiguous(), text[:, 1:].contiguous()), token_loss
