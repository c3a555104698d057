"""GNMT: translation with a bidirectional first layer, residual layers and one attention for all."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from devplace.workloads.common import Built, State, embedded_steps, token_loss, zero_state
from devplace.workloads.nmt import SMALL, AdditiveAttention, Nmt, NmtConfig, random_pairs

CONFIGS = {"gnmt-4": {"full": NmtConfig(layers=4), "small": replace(SMALL, layers=4)}}
FIRST_RESIDUAL = 2  # index of the first layer with a residual connection: the third


def run_layer(
    cell: nn.Module, inputs: list[Tensor], hidden: int, is_reversed: bool = False
) -> tuple[list[Tensor], State]:
    """Outputs of one layer per time step, in the order of the inputs, and its last state."""
    state = zero_state(inputs[0], hidden)
    outputs = []
    for x in reversed(inputs) if is_reversed else inputs:
        state = cell(x, state)
        outputs.append(state[0])
    return outputs[::-1] if is_reversed else outputs, state


class GnmtEncoder(nn.Module):
    """Layer 0 reads the source in both directions; layers from the third on are residual."""

    def __init__(self, config: NmtConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.hidden = hidden
        self.embedding = nn.Embedding(config.vocabulary, hidden)
        self.backward_cell = nn.LSTMCell(hidden, hidden)
        self.cells = nn.ModuleList(
            nn.LSTMCell(2 * hidden if layer == 1 else hidden, hidden)
            for layer in range(config.layers)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, source: Tensor) -> tuple[Tensor, list[State]]:
        """Outputs `[batch, seq, hidden]` and each layer's last state, for ids `[batch, seq]`."""
        inputs = [self.dropout(x) for x in embedded_steps(self.embedding, source)]
        ahead, state = run_layer(self.cells[0], inputs, self.hidden)
        back, _ = run_layer(self.backward_cell, inputs, self.hidden, is_reversed=True)
        finals = [state]
        outputs = [torch.cat(pair, 1) for pair in zip(ahead, back, strict=True)]
        for layer, cell in enumerate(self.cells[1:], 1):
            inputs = outputs
            dropped = [self.dropout(x) for x in inputs]
            outputs, state = run_layer(cell, dropped, self.hidden)
            if layer >= FIRST_RESIDUAL:
                outputs = [y + x for y, x in zip(outputs, inputs, strict=True)]
            finals.append(state)
        return torch.stack(outputs, 1), finals


class GnmtDecoderStep(nn.Module):
    """One target position; the bottom layer asks, and every layer gets the same context."""

    def __init__(self, config: NmtConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.cells = nn.ModuleList(nn.LSTMCell(2 * hidden, hidden) for _ in range(config.layers))
        self.attention = AdditiveAttention(hidden)
        self.projection = nn.Linear(2 * hidden, config.vocabulary)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, feed: Tensor, states: list[State], memory: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor, list[State]]:
        """Logits `[batch, vocabulary]`, the context, and the new states; arguments as for NMT."""
        states = list(states)
        states[0] = self.cells[0](torch.cat([self.dropout(x), feed], 1), states[0])
        output = states[0][0]
        context = self.attention(output, memory, keys)
        for layer, cell in enumerate(self.cells[1:], 1):
            states[layer] = cell(torch.cat([self.dropout(output), context], 1), states[layer])
            below, output = output, states[layer][0]
            if layer >= FIRST_RESIDUAL:
                output = output + below
        return self.projection(torch.cat([output, context], 1)), context, states


def build(config: NmtConfig) -> Built:
    """Model, random sentence pairs, and the loss.

    Source: Wu et al. (2016), Google's Neural Machine Translation System, arXiv 1609.08144, figures
    1 and 4; 4 layers as in Lan et al. (2021), Mars, ICPP. Differs from it in: the bottom decoder
    layer asks with its output of this step, not of the last one; 4 layers instead of 8. Sizes are
    those of nmt-4, so the two compare; Jeon et al. (2020), Baechi, used 512 units, batch 128 and
    30,000 word pieces.
    """
    model = Nmt(config, GnmtEncoder(config), GnmtDecoderStep(config))
    return model, random_pairs(config), token_loss
