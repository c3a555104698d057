"""A policy that scores (group, device) pairs: any number of groups, devices and op types."""
# mypy: allow-subclassing-any

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from devplace.placers.rl.count_head import CountHead
from devplace.placers.rl.mlp import Mlp
from devplace.placers.rl.policies import masked, sample
from devplace.placers.rl.state_features import GROUP_FEATURES, PAIR_FEATURES, QUEUE, TRAFFIC, Scene

I64 = NDArray[np.int64]
LIMIT = 3.0
"""Scores stay within plus or minus this, so that no device is ruled out before it was tried."""


class PairPolicy(nn.Module):
    """Groups exchange messages along edges; then, one after the other, each picks a device.

    The score of a pair is a network's of the group's embedding and of the pair's features, plus a
    line through the features whose first weights are those of a list scheduler: less queueing,
    less traffic. The last layer of the network begins at zero, so training begins with that rule.
    `counts` chooses before that how many groups there are.

    Args:
        hidden: Size of embeddings.
        rounds: Of messages.
        sharpness: First weights of the rule.
    """

    def __init__(self, hidden: int = 32, rounds: int = 3, sharpness: float = 4.0) -> None:
        super().__init__()
        self.first = nn.Linear(GROUP_FEATURES, hidden)
        self.rounds = nn.ModuleList(nn.Linear(3 * hidden, hidden) for _ in range(rounds))
        self.score = Mlp([hidden + PAIR_FEATURES, 64, 32, 1])
        self.rule = nn.Linear(PAIR_FEATURES, 1, bias=False)
        self.counts = CountHead()
        with torch.no_grad():
            last = self.score.layers[-1]
            last.weight.zero_()
            last.bias.zero_()
            self.rule.weight.zero_()
            self.rule.weight[0, [QUEUE, TRAFFIC]] = -sharpness

    def embed(self, scene: Scene) -> Tensor:
        """What each group is, in its surroundings. `[M, H]`"""
        device = self.rule.weight.device
        edges = torch.as_tensor(scene.edges, device=device)
        weights = torch.as_tensor(scene.weights, device=device)
        nodes = torch.relu(self.first(torch.as_tensor(scene.groups, device=device)))
        for layer in self.rounds:
            into = torch.zeros_like(nodes)
            into = into.index_add(0, edges[1], nodes[edges[0]] * weights[0][:, None])
            out = torch.zeros_like(nodes)
            out = out.index_add(0, edges[0], nodes[edges[1]] * weights[1][:, None])
            nodes = nodes + torch.relu(layer(torch.cat([nodes, into, out], 1)))
        return nodes

    def forward(self, groups: Tensor, pairs: Tensor, may: Tensor, own: Tensor) -> Tensor:
        """Logits of pairs.

        Args:
            groups: Embeddings, `[M, H]` or `[H]`.
            pairs: Features. `[B, M, A, F]` or `[B, A, F]`
            may: Devices that are not ruled out, bool; without `F`.
            own: A number per pair of this problem, added. `[M, A]` or `[A]`
        """
        rows = groups.unsqueeze(-2).expand(*pairs.shape[:-1], -1)
        scores = self.score(torch.cat([rows, pairs], -1)) + self.rule(pairs)
        return masked(softly_bounded(scores.squeeze(-1)) + own, may)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def act(
        self, scene: Scene, own: Tensor, count: int, generator: torch.Generator | None
    ) -> tuple[I64, Tensor, Tensor]:
        """Place all groups of some samples.

        Args:
            scene: The problem.
            own: A number per pair of this problem, added to the scores. `[M, A]`
            count: Samples.
            generator: Of random choices; None: always the best score, the first of equal ones.

        Returns:
            Actions `[B, M]`; features `[B, M, A, F]` and what was not ruled out `[B, M, A]`, with
            which `forward` gives the logits that they were drawn from.
        """
        groups, progress = self.embed(scene), scene.begin(count)
        device = groups.device
        seen, open_to = [], []
        for group in range(scene.num_groups):
            features, free = scene.pairs(progress, group)
            pairs, may = torch.as_tensor(features).to(device), torch.as_tensor(free).to(device)
            logits = self(groups[group], pairs, may, own[group])
            # scores of equal devices may differ in their last bits
            chosen = sample(logits, generator) if generator else logits.mul(1e4).round().argmax(-1)
            scene.put(progress, group, chosen.cpu().numpy())
            seen.append(pairs)
            open_to.append(may)
        return progress.placed, torch.stack(seen, 1), torch.stack(open_to, 1)


def softly_bounded(scores: Tensor) -> Tensor:
    """`C s / (C + |s|)`: within plus or minus C, and of different scores the order is kept."""
    return LIMIT * scores / (LIMIT + scores.abs())
