"""A learned choice of the number of groups, near the count of a rule."""
# mypy: allow-subclassing-any

from __future__ import annotations

import torch
from torch import Tensor, nn

from devplace.placers.rl.mlp import Mlp
from devplace.placers.rl.policies import masked
from devplace.placers.rl.state_features import PROBLEM_FEATURES

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Counts to choose from, as multiples of the rule's."""
RULE = FACTORS.index(1.0)
FAVOUR = 3.0
"""First logit of the rule's count; those of the others are 0."""


class CountHead(nn.Module):
    """A distribution over counts of groups from a summary of graph and machine.

    Before training the rule's count is the likeliest on every problem.

    Args:
        hidden: Size of the hidden layer.
    """

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.score = Mlp([PROBLEM_FEATURES, hidden, len(FACTORS)])
        with torch.no_grad():
            last = self.score.layers[-1]
            last.weight.zero_()
            last.bias.zero_()
            last.bias[RULE] = FAVOUR

    def forward(self, summary: Tensor, is_open: Tensor) -> Tensor:
        """Logits of counts.

        Args:
            summary: `[..., PROBLEM_FEATURES]`
            is_open: Counts that there are, bool `[..., C]`.
        """
        return masked(self.score(summary), is_open)
