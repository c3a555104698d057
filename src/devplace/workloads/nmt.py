"""Neural machine translation with attention, unrolled in time: 2, 4 or 8 layers a side."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from devplace.workloads.common import (
    Built,
    State,
    embedded_steps,
    random_ids,
    token_loss,
    zero_state,
)


@dataclass(frozen=True)
class NmtConfig:
    """Sizes of a translation model.

    Attributes:
        layers: LSTM layers of the encoder, and of the decoder.
        hidden: Units per layer and size of the embeddings.
        batch: Sentence pairs per step; 64 as commonly reported for Mirhoseini et al. (2017).
        seq: Time steps of source and target.
        vocabulary: Word pieces of either language.
        dropout: On what enters a layer; off by default.
    """

    layers: int = 2
    hidden: int = 1024
    batch: int = 64
    seq: int = 40
    vocabulary: int = 32_000
    dropout: float = 0.0


SMALL = NmtConfig(hidden=8, batch=4, seq=4, vocabulary=50)
CONFIGS = {
    f"nmt-{layers}": {
        "full": NmtConfig(layers=layers),
        "small": replace(SMALL, layers=layers),
    }
    for layers in (2, 4, 8)
}


class AdditiveAttention(nn.Module):
    """Additive attention over the encoder's outputs.

    Source: Bahdanau et al. (2015), arXiv 1409.0473, appendix A.1.2. The keys do not depend on the
    step and are computed once, by `key`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, state: Tensor, memory: Tensor, keys: Tensor) -> Tensor:
        """Context `[batch, hidden]` for a state `[batch, hidden]`.

        Args:
            state: Decoder output that asks. Shape `[batch, hidden]`.
            memory: Encoder outputs. Shape `[batch, seq, hidden]`.
            keys: `key(memory)`. Shape `[batch, seq, hidden]`.
        """
        mixed = torch.tanh(self.query(state).unsqueeze(1) + keys)
        weights = torch.softmax(self.score(mixed).squeeze(-1), -1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


class Encoder(nn.Module):
    """Stacked LSTM cells over the source, layer by layer."""

    def __init__(self, config: NmtConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.hidden = hidden
        self.embedding = nn.Embedding(config.vocabulary, hidden)
        self.cells = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, source: Tensor) -> tuple[Tensor, list[State]]:
        """Outputs `[batch, seq, hidden]` and each layer's last state, for ids `[batch, seq]`."""
        outputs = list(embedded_steps(self.embedding, source))
        finals = []
        for cell in self.cells:
            state = zero_state(outputs[0], self.hidden)
            for step, x in enumerate(outputs):
                state = cell(self.dropout(x), state)
                outputs[step] = state[0]
            finals.append(state)
        return torch.stack(outputs, 1), finals


class DecoderStep(nn.Module):
    """One target position: all layers, attention, logits."""

    def __init__(self, config: NmtConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.cells = nn.ModuleList(
            nn.LSTMCell(hidden if layer else 2 * hidden, hidden) for layer in range(config.layers)
        )
        self.attention = AdditiveAttention(hidden)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.projection = nn.Linear(hidden, config.vocabulary)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, feed: Tensor, states: list[State], memory: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor, list[State]]:
        """Logits `[batch, vocabulary]`, what the next step is fed, and the new states.

        Args:
            x: Embedded previous word. Shape `[batch, hidden]`.
            feed: Attention result of the previous step. Shape `[batch, hidden]`.
            states: One state per layer.
            memory: Encoder outputs. Shape `[batch, seq, hidden]`.
            keys: Keys of the memory. Shape `[batch, seq, hidden]`.
        """
        states = list(states)
        output = torch.cat([self.dropout(x), feed], 1)
        for layer, cell in enumerate(self.cells):
            states[layer] = cell(output, states[layer])
            output = self.dropout(states[layer][0])
        context = self.attention(output, memory, keys)
        attended = torch.tanh(self.combine(torch.cat([output, context], 1)))
        return self.projection(attended), attended, states


class Nmt(nn.Module):
    """Encoder and decoder; every LSTM cell is called once per time step.

    Cells of layer l at step t need only layer l-1 at t and layer l at t-1, so layers and steps run
    side by side along diagonals.

    Source: Bahdanau et al. (2015), arXiv 1409.0473 (attention); Luong et al. (2015), arXiv
    1508.04025, section 3.3 (input feeding, stacked LSTM); placed with 2, 4 and 8 layers by
    Mirhoseini et al. (2018), A Hierarchical Model for Device Placement, ICLR. Sizes not named there
    (1024 units, 40 steps, 32,000 word pieces) are this project's choice.
    """

    def __init__(self, config: NmtConfig, encoder: nn.Module, step: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.target_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.step = step

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits `[batch, seq, vocabulary]` for source ids and target ids shifted right."""
        memory, states = self.encoder(source)
        keys = self.step.attention.key(memory)
        feed = torch.zeros_like(states[0][0])
        logits = []
        for x in embedded_steps(self.target_embedding, target):
            step_logits, feed, states = self.step(x, feed, states, memory, keys)
            logits.append(step_logits)
        return torch.stack(logits, 1)


def random_pairs(config: NmtConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Source ids, target ids and the target ids one step later, each `[batch, seq]`."""
    source = random_ids(config.vocabulary, config.batch, config.seq)
    target = random_ids(config.vocabulary, config.batch, config.seq + 1)
    return source, target[:, :-1].contiguous(), target[:, 1:].contiguous()


def build(config: NmtConfig) -> Built:
    """Model, random sentence pairs, and the loss."""
    model = Nmt(config, Encoder(config), DecoderStep(config))
    return model, random_pairs(config), token_loss
