"""Noise on logits, identical when sampling and when scoring."""
# mypy: allow-subclassing-any

from __future__ import annotations

import torch
from torch import Tensor

from devplace.research.policies import masked, sample
from devplace.research.seq2seq import Seq2Seq


class NoisySeq2Seq(Seq2Seq):
    """A `Seq2Seq` with noise on its logits: the same when they are drawn from and scored."""

    def logits(
        self,
        groups: Tensor,
        actions: Tensor,
        allowed: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """As `Seq2Seq.logits`, plus noise `[B, M, A]`."""
        return masked(noisy(super().logits(groups, actions), noise, step=1), allowed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def act(
        self,
        groups: Tensor,
        count: int,
        generator: torch.Generator,
        allowed: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Seq2Seq.act`, plus noise `[B, M, A]`."""
        states, keys, (hidden, cell) = self.encode(groups)
        state = (hidden.expand(-1, count, -1).contiguous(), cell.expand(-1, count, -1).contiguous())
        last = torch.full((count, 1), self.num_actions, dtype=torch.int64, device=groups.device)
        chosen, every = [], []
        for step in range(groups.shape[1]):
            output, state = self.decoder(self.chosen(last), state)
            logits = self._head_at(output[:, 0], states, keys)
            logits = noisy(logits, None if noise is None else noise[:, step])
            logits = masked(logits, None if allowed is None else allowed[step])
            last = sample(logits, generator)[:, None]
            chosen.append(last)
            every.append(logits)
        return torch.cat(chosen, 1), torch.stack(every, 1)


def noise_of(
    shape: tuple[int, ...], noise: float, generator: torch.Generator, device: torch.device
) -> Tensor | None:
    """Normal noise of deviation `noise`; None if that is 0."""
    return noise * torch.randn(shape, generator=generator).to(device) if noise else None


def noisy(logits: Tensor, noise: Tensor | None, step: int | None = None) -> Tensor:
    """Logits plus noise times their root mean square, of all or of each index of axis `step`."""
    if noise is None:
        return logits
    over = [axis for axis in range(logits.dim()) if axis != step]
    return logits + noise * logits.detach().square().mean(over, keepdim=True).sqrt()
