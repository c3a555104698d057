"""The LSTM workloads with fused `nn.LSTM` wherever their structure allows it.

Same parameters, sizes and numbers as the unrolled workloads; `from_unrolled` copies the weights.
`nn.LSTM` runs all time steps (and, without residual connections, all layers) in one cuDNN call.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from devplace.workloads.gnmt import FIRST_RESIDUAL, GnmtDecoderStep, GnmtEncoder
from devplace.workloads.nmt import Nmt
from devplace.workloads.rnnlm import Rnnlm

# What one cuDNN call covers, by kind of model.
FUSED = {
    "rnnlm": "all layers and steps in one call",
    "nmt": "encoder: all layers and steps in one call; decoder: input feeding allows one call of "
    "all layers per step, attention per step; logits of all steps in one product",
    "gnmt": "encoder: one call per layer, the first one bidirectional, residual sums between; "
    "decoder: bottom layer and attention per step, then one call for each upper layer over all "
    "steps; logits of all steps in one product",
}


def fused(cells: Sequence[nn.LSTMCell], back: nn.LSTMCell | None = None) -> nn.LSTM:
    """One `nn.LSTM` with the weights of stacked cells, or of one cell for each direction."""
    first = cells[0]
    lstm = nn.LSTM(
        first.input_size,
        first.hidden_size,
        len(cells),
        batch_first=True,
        bidirectional=back is not None,
    )
    lstm = lstm.to(first.weight_ih.device, first.weight_ih.dtype)
    named = [(f"l{layer}", cell) for layer, cell in enumerate(cells)]
    named += [] if back is None else [("l0_reverse", back)]
    with torch.no_grad():
        for suffix, cell in named:
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(lstm, f"{kind}_{suffix}").copy_(getattr(cell, kind))
    return lstm


class FusedRnnlm(nn.Module):
    """The language model with one LSTM call."""

    def __init__(self, unrolled: Rnnlm) -> None:
        super().__init__()
        self.embedding = unrolled.embedding
        self.lstm = fused(list(unrolled.cells))
        self.projection = unrolled.projection

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids `[batch, seq]` to logits `[batch, seq, vocabulary]`."""
        return self.projection(self.lstm(self.embedding(tokens))[0])


class FusedNmt(nn.Module):
    """The translation model with a fused encoder and a decoder of one LSTM call per step."""

    def __init__(self, unrolled: Nmt) -> None:
        super().__init__()
        self.source_embedding = unrolled.encoder.embedding
        self.encoder = fused(list(unrolled.encoder.cells))
        self.target_embedding = unrolled.target_embedding
        self.decoder = fused(list(unrolled.step.cells))
        self.attention = unrolled.step.attention
        self.combine = unrolled.step.combine
        self.projection = unrolled.step.projection

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits `[batch, seq, vocabulary]` for source ids and target ids shifted right."""
        memory, state = self.encoder(self.source_embedding(source))
        keys = self.attention.key(memory)
        feed = torch.zeros_like(memory[:, 0])
        attended = []
        for x in self.target_embedding(target).unbind(1):
            output, state = self.decoder(torch.cat([x, feed], 1).unsqueeze(1), state)
            output = output.squeeze(1)
            context = self.attention(output, memory, keys)
            feed = torch.tanh(self.combine(torch.cat([output, context], 1)))
            attended.append(feed)
        return self.projection(torch.stack(attended, 1))


class FusedGnmt(nn.Module):
    """GNMT with one LSTM call per layer, except the decoder's bottom layer, which asks."""

    def __init__(self, unrolled: Nmt) -> None:
        super().__init__()
        encoder: GnmtEncoder = unrolled.encoder
        step: GnmtDecoderStep = unrolled.step
        self.source_embedding = encoder.embedding
        self.bottom = fused([encoder.cells[0]], encoder.backward_cell)
        self.upper = nn.ModuleList(fused([cell]) for cell in encoder.cells[1:])
        self.target_embedding = unrolled.target_embedding
        self.asking = step.cells[0]
        self.decoder = nn.ModuleList(fused([cell]) for cell in step.cells[1:])
        self.attention = step.attention
        self.projection = step.projection

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits `[batch, seq, vocabulary]` for source ids and target ids shifted right."""
        memory, states = self._encode(source)
        outputs, contexts = self._ask(self.target_embedding(target), memory, states[0])
        for layer, lstm in enumerate(self.decoder, 1):
            hidden, cell = states[layer]
            state = (hidden.unsqueeze(0), cell.unsqueeze(0))
            below, (outputs, _) = outputs, lstm(torch.cat([outputs, contexts], 2), state)
            if layer >= FIRST_RESIDUAL:
                outputs = outputs + below
        return self.projection(torch.cat([outputs, contexts], 2))

    def _encode(self, source: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Outputs `[batch, seq, hidden]` and each layer's last state."""
        outputs, (hidden, cell) = self.bottom(self.source_embedding(source))
        states = [(hidden[0], cell[0])]
        for layer, lstm in enumerate(self.upper, 1):
            below, (outputs, (hidden, cell)) = outputs, lstm(outputs)
            if layer >= FIRST_RESIDUAL:
                outputs = outputs + below
            states.append((hidden[0], cell[0]))
        return outputs, states

    def _ask(self, embedded: Tensor, memory: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Bottom layer's outputs and contexts of all steps, each `[batch, seq, hidden]`."""
        keys = self.attention.key(memory)
        context = torch.zeros_like(memory[:, 0])
        outputs, contexts = [], []
        for x in embedded.unbind(1):
            state = self.asking(torch.cat([x, context], 1), state)
            context = self.attention(state[0], memory, keys)
            outputs.append(state[0])
            contexts.append(context)
        return torch.stack(outputs, 1), torch.stack(contexts, 1)


def from_unrolled(model: nn.Module) -> tuple[nn.Module, str]:
    """The fused twin of an LSTM workload's model, and what is fused.

    Embeddings, attention and projections are shared with the given model, LSTM weights copied.

    Raises:
        ValueError: The model has no LSTM, or dropout, which the twins leave out.
    """
    if any(isinstance(part, nn.Dropout) and part.p for part in model.modules()):
        raise ValueError("dropout is not fused; build the workload with dropout 0")
    if isinstance(model, Rnnlm):
        return FusedRnnlm(model), FUSED["rnnlm"]
    if isinstance(model, Nmt) and isinstance(model.encoder, GnmtEncoder):
        return FusedGnmt(model), FUSED["gnmt"]
    if isinstance(model, Nmt):
        return FusedNmt(model), FUSED["nmt"]
    raise ValueError(f"{type(model).__name__} has no LSTM to fuse")
