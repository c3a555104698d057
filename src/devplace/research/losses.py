"""Losses to minimise, as pure functions. Rewards are to be maximised, so all carry a minus.

In shapes, `B` is samples. Log-probabilities are those of the actions that were scored; advantages
are rewards less a baseline and carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reinforce(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """`-mean(advantage * log p)`: its gradient is minus the policy gradient, unbiased. `[B]`

    Source: Williams (1992), Simple statistical gradient-following algorithms, REINFORCE.
    """
    return -(advantage.detach() * log_prob).mean()


def ppo_clip(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """`-mean(min(r A, clip(r, 1 - e, 1 + e) A))` with `r = p / p_old`. `[B]`, or any shape.

    Source: Schulman et al. (2017), Proximal policy optimization, arXiv 1707.06347, equation 7.
    """
    advantage = advantage.detach()
    ratio = (log_prob - old_log_prob.detach()).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def ppo_penalty(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, kl: Tensor, beta: float
) -> Tensor:
    """`-mean(r A) + beta mean(KL(old || new))` with `r = p / p_old`. `[B]`, or any shape.

    Source: Schulman et al. (2017), arXiv 1707.06347, equation 8.
    """
    ratio = (log_prob - old_log_prob.detach()).exp()
    return -(ratio * advantage.detach()).mean() + beta * kl.mean()


def adapted_beta(beta: float, kl: float, target: float) -> float:
    """The next penalty: doubled above 1.5 targets of divergence, halved below target / 1.5.

    Source: Schulman et al. (2017), arXiv 1707.06347, section 4.
    """
    if kl > 1.5 * target:
        return beta * 2
    return beta / 2 if kl < target / 1.5 else beta


def approximate_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """`mean((r - 1) - log r)`, an estimate of KL(old || new) from samples of old.

    Source: Schulman (2020), Approximating KL divergence, joschu.net/blog/kl-approx.html.
    """
    difference = (log_prob - old_log_prob).detach()
    return (difference.exp() - 1 - difference).mean()


def standardised(advantage: Tensor) -> Tensor:
    """Zero mean, unit deviation; zero where all are equal. `[B]`"""
    centred = advantage - advantage.mean()
    deviation = centred.square().mean().sqrt()
    return centred / deviation if float(deviation) > 1e-12 else torch.zeros_like(centred)
