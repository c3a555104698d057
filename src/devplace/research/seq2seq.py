"""Sequence-to-sequence policy: bi-LSTM encoder, LSTM decoder with content-based attention.

In shapes, `B` is samples, `M` groups (the length of the sequence), `F` features, `H` hidden size,
`A` devices to choose from.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

import torch
from torch import Tensor, nn

from devplace.research.policies import bounded, masked, sample


class Seq2Seq(nn.Module):
    """Reads group embeddings, gives one device after the other.

    The decoder's input at step t is the embedding of the device chosen at t - 1, at first a learned
    one. Attention over the encoder's states is additive, `v tanh(W1 e + W2 h)`; logits come from
    state and context: `C tanh(l / T)` of `[h; context] W`. Attention does not feed the decoder, so
    known actions are scored for all steps at once.

    Source: Mirhoseini et al. (2018), A hierarchical model for device placement, ICLR, equation 1,
    and its released code for sizes and initialisation; attention of Bahdanau et al. (2015), arXiv
    1409.0473.

    Args:
        features: F.
        num_actions: A.
        hidden: H, even; each direction of the encoder has half of it.
        tanh_constant: C.
        temperature: T.
        attention: Width of the attention's hidden layer; by default H.
    """

    def __init__(
        self,
        features: int,
        num_actions: int,
        hidden: int = 512,
        tanh_constant: float = 5.0,
        temperature: float = 10.0,
        attention: int | None = None,
    ) -> None:
        super().__init__()
        width = attention or hidden
        self.num_actions, self.hidden = num_actions, hidden
        self.tanh_constant, self.temperature = tanh_constant, temperature
        self.encoder = nn.LSTM(features, hidden // 2, bidirectional=True, batch_first=True)
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.chosen = nn.Embedding(num_actions + 1, hidden)  # the last one begins
        self.keys = nn.Linear(hidden, width, bias=False)
        self.query = nn.Linear(hidden, width, bias=False)
        self.energy = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(2 * hidden, num_actions, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def encode(self, groups: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """`[B or 1, M, F]` -> states `[., M, H]`, attention keys `[., M, .]`, decoder's start."""
        states, (last, cell) = self.encoder(groups)
        start = (_joined(last), _joined(cell))
        return states, self.keys(states), start

    def logits(self, groups: Tensor, actions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Logits at each step, given the actions taken at the steps before it.

        Args:
            groups: Embeddings; one row for all samples, or one per sample. `[1 or B, M, F]`
            actions: int64 `[B, M]`
            allowed: bool `[M, A]`

        Returns:
            `[B, M, A]`
        """
        states, keys, (hidden, cell) = self.encode(groups)
        count = len(actions)
        begin = torch.full_like(actions[:, :1], self.num_actions)
        inputs = self.chosen(torch.cat([begin, actions[:, :-1]], 1))
        start = (hidden.expand(-1, count, -1).contiguous(), cell.expand(-1, count, -1).contiguous())
        outputs, _ = self.decoder(inputs, start)
        found = [
            self._head(outputs[b], _row(states, b), _row(keys, b)) for b in range(count)
        ]  # one sample at a time: all pairs of steps of all samples would not fit in memory
        return masked(torch.stack(found), allowed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def act(
        self,
        groups: Tensor,
        count: int,
        generator: torch.Generator,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw `count` placements: actions int64 `[B, M]` and the logits they came from.

        `groups` as in `logits`.
        """
        states, keys, (hidden, cell) = self.encode(groups)
        state = (hidden.expand(-1, count, -1).contiguous(), cell.expand(-1, count, -1).contiguous())
        last = torch.full((count, 1), self.num_actions, dtype=torch.int64, device=groups.device)
        chosen, every = [], []
        for step in range(groups.shape[1]):
            output, state = self.decoder(self.chosen(last), state)
            logits = self._head_at(output[:, 0], states, keys)
            logits = masked(logits, None if allowed is None else allowed[step])
            last = sample(logits, generator)[:, None]
            chosen.append(last)
            every.append(logits)
        return torch.cat(chosen, 1), torch.stack(every, 1)

    def _head(self, outputs: Tensor, states: Tensor, keys: Tensor) -> Tensor:
        """Logits of one sample at all steps. `[M, H]`, `[M, H]`, `[M, .]` -> `[M, A]`"""
        energy = self.energy(torch.tanh(self.query(outputs)[:, None] + keys[None])).squeeze(-1)
        context = torch.softmax(energy, -1) @ states
        return self._bounded(self.head(torch.cat([outputs, context], -1)))

    def _head_at(self, output: Tensor, states: Tensor, keys: Tensor) -> Tensor:
        """Logits of all samples at one step. `[B, H]`, `[., M, H]`, `[., M, .]` -> `[B, A]`"""
        energy = self.energy(torch.tanh(self.query(output)[:, None] + keys)).squeeze(-1)
        context = (torch.softmax(energy, -1)[:, None] @ states).squeeze(1)
        return self._bounded(self.head(torch.cat([output, context], -1)))

    def _bounded(self, logits: Tensor) -> Tensor:
        return bounded(logits, self.tanh_constant, self.temperature)


def _joined(directions: Tensor) -> Tensor:
    """Both directions of the encoder's last states side by side. `[2, ., H/2]` -> `[1, ., H]`"""
    return torch.cat([directions[0], directions[1]], -1)[None]


def _row(values: Tensor, row: int) -> Tensor:
    return values[row if len(values) > 1 else 0]
