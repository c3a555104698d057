"""Placers that read a long sequence of groups one segment after the other.

In shapes, `B` is samples, `M` groups (the length of the sequence), `S` groups of a segment, `F`
features, `H` hidden size, `A` devices to choose from.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

import torch
from torch import Tensor, nn

from devplace.research.mlp import Mlp
from devplace.research.policies import bounded, masked, sample


class SegmentSeq2Seq(nn.Module):
    """Mars's placer: bi-LSTM encoder and LSTM decoder with attention inside a segment.

    The states of the encoder's forward direction and of the decoder go on from segment to segment;
    the backward direction begins anew in each, and attention sees the current segment only, so that
    work and memory grow with M S instead of M M. The decoder reads the encoder's state of the group
    it places and an embedding of the device chosen before; attention is `softmax(q W e / sqrt(H))`.
    Attention does not feed the decoder, so known actions are scored for all steps at once.

    Args:
        features: F.
        num_actions: A.
        hidden: H, even; each direction of the encoder has half of it.
        segment: S.
        tanh_constant: C of the logits, `C tanh(l)`.
    """

    def __init__(
        self, features: int, num_actions: int, hidden: int, segment: int, tanh_constant: float
    ) -> None:
        super().__init__()
        self.num_actions, self.segment, self.tanh_constant = num_actions, segment, tanh_constant
        self.onward = nn.LSTM(features, hidden // 2, batch_first=True)
        self.backward_in_segment = nn.LSTM(features, hidden // 2, batch_first=True)
        self.chosen = nn.Embedding(num_actions + 1, hidden)  # the last one begins
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.head = nn.Linear(2 * hidden, num_actions, bias=False)

    def encode(self, groups: Tensor) -> Tensor:
        """States of the encoder. `[M, F]` -> `[M, H]`"""
        onward, _ = self.onward(groups[None])
        back = [
            self.backward_in_segment(part.flip(0)[None])[0][0].flip(0)
            for part in groups.split(self.segment)
        ]
        return torch.cat([onward[0], torch.cat(back)], 1)

    def logits(self, groups: Tensor, actions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Logits at each step, given the actions taken at the steps before it.

        Args:
            groups: Embeddings. `[M, F]`
            actions: int64 `[B, M]`
            allowed: bool `[M, A]`

        Returns:
            `[B, M, A]`
        """
        states = self.encode(groups)
        begin = torch.full_like(actions[:, :1], self.num_actions)
        chosen = self.chosen(torch.cat([begin, actions[:, :-1]], 1))
        outputs, _ = self.decoder(states + chosen)
        pairs = zip(outputs.split(self.segment, 1), states.split(self.segment), strict=True)
        return masked(torch.cat([self._logits(*pair) for pair in pairs], 1), allowed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def act(
        self,
        groups: Tensor,
        count: int,
        generator: torch.Generator,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw `count` placements: actions int64 `[B, M]` and the logits they came from."""
        states = self.encode(groups)
        segments = states.split(self.segment)
        last = torch.full((count, 1), self.num_actions, dtype=torch.int64, device=groups.device)
        state: tuple[Tensor, Tensor] | None = None
        taken, every = [], []
        for step in range(len(groups)):
            output, state = self.decoder(states[step] + self.chosen(last), state)
            logits = self._logits(output, segments[step // self.segment])[:, 0]
            logits = masked(logits, None if allowed is None else allowed[step])
            last = sample(logits, generator)[:, None]
            taken.append(last)
            every.append(logits)
        return torch.cat(taken, 1), torch.stack(every, 1)

    def _logits(self, outputs: Tensor, states: Tensor) -> Tensor:
        """Logits from decoder outputs and the encoder's states of their segment.

        `[B, T, H]`, `[S, H]` -> `[B, T, A]`
        """
        energy = self.query(outputs) @ states.T / states.shape[1] ** 0.5
        context = torch.softmax(energy, -1) @ states
        logits = self.head(torch.cat([outputs, context], -1))
        return bounded(logits, self.tanh_constant, 1.0)


class SegmentTransformer(nn.Module):
    """GDP's placer: attention over a segment and the one before it, all devices at once.

    No choice depends on another, so all samples share one set of logits. As in Transformer-XL the
    states of the segment before carry no gradient.

    Source: Zhou et al. (2019), GDP: generalized device placement for dataflow graphs, arXiv
    1910.01578; Dai et al. (2019), Transformer-XL, arXiv 1901.02860. Differs from them in that
    positions are not relative: the caller puts them into the embeddings.

    Args:
        features: F.
        num_actions: A.
        hidden: H, a multiple of `heads`.
        segment: S.
        tanh_constant: C of the logits, `C tanh(l)`.
        layers, heads: Attention layers, and heads of each.
    """

    def __init__(
        self,
        features: int,
        num_actions: int,
        hidden: int,
        segment: int,
        tanh_constant: float,
        layers: int = 2,
        heads: int = 2,
    ) -> None:
        super().__init__()
        self.segment, self.tanh_constant = segment, tanh_constant
        self.enter = nn.Linear(features, hidden)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(hidden, heads, batch_first=True) for _ in range(layers)
        )
        self.feed = nn.ModuleList(Mlp([hidden, 2 * hidden, hidden]) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * layers))
        self.head = nn.Linear(hidden, num_actions)

    def forward(self, groups: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Logits of all groups. `[M, F]` -> `[M, A]`"""
        parts = self.enter(groups).split(self.segment)
        for k, (attention, feed) in enumerate(zip(self.attention, self.feed, strict=True)):
            found, before = [], None
            for part in parts:
                seen = part if before is None else torch.cat([before.detach(), part])
                context = attention(part[None], seen[None], seen[None], need_weights=False)[0][0]
                middle = self.norms[2 * k](part + context)
                found.append(self.norms[2 * k + 1](middle + feed(middle)))
                before = part
            parts = found
        return masked(bounded(self.head(torch.cat(parts)), self.tanh_constant, 1.0), allowed)
