"""Independent choices of a device for each group, as pure functions of logits.

In shapes, `B` is samples, `M` groups, `A` devices to choose from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORBIDDEN = -1e9
"""Logit of an action that must not be taken; finite, so that 0 * log 0 is 0."""


def masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Logits with actions ruled out. `[..., M, A]`"""
    return logits if allowed is None else logits.masked_fill(~allowed, FORBIDDEN)


def bounded(logits: Tensor, tanh_constant: float, temperature: float) -> Tensor:
    """`C tanh(l / T)`: keeps the policy from certainty. HDP's equation 1; there C = 5, T = 10."""
    return tanh_constant * torch.tanh(logits / temperature)


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One action per row, drawn with the given generator. `[..., A]` -> int64 `[...]`"""
    flat = torch.softmax(logits.detach(), -1).reshape(-1, logits.shape[-1]).cpu()
    drawn = torch.multinomial(flat, 1, replacement=True, generator=generator)
    return drawn.reshape(logits.shape[:-1]).to(logits.device)


def log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability of each action. `[..., A]`, `[...]` -> `[...]`"""
    return torch.log_softmax(logits, -1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each distribution, nats. `[..., A]` -> `[...]`"""
    logp = torch.log_softmax(logits, -1)
    return -(logp.exp() * logp).sum(-1)


def divergence(old_logits: Tensor, new_logits: Tensor) -> Tensor:
    """`KL(old || new)` of each distribution, nats. `[..., A]` -> `[...]`"""
    old, new = torch.log_softmax(old_logits, -1), torch.log_softmax(new_logits, -1)
    return (old.exp() * (old - new)).sum(-1)


def as_actions(array: Any, device: torch.device) -> Tensor:
    """Actions of an environment as int64 tensor."""
    return torch.as_tensor(array, dtype=torch.int64, device=device)
