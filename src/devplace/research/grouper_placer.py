"""The grouper-placer row of Mars's table: HDP's two networks, learned by Mars's PPO.

A feed-forward grouper gives each unit a softmax over coarse groups; a sequence-to-sequence placer
with attention (`seq2seq.Seq2Seq`) then gives each coarse group a device. Both are scored on the
grouping and the devices that were drawn.

Source: Mirhoseini et al. (2018), A hierarchical model for device placement, ICLR.

Differs from it in:

- The loop is that of `mars`, with its settings, tuned on nmt-4 for it.
- Units are the groups that Mars places, so that all rows of the table decide about the same things.
- Every placement drawn has its own grouping.
- The choice for a coarse group without members does not count.

On graphs of a few ops it puts everything into one group before the placer has learned, unless its
entropy weighs more (0.2, Adam's rate 0.01: tests); on a layered graph of 48 groups its best of 600
evaluations is that of random sampling, 0.95 to 1.07 of it on four seeds.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from devplace.research.environment import Environment
from devplace.research.features import group_adjacency, group_features
from devplace.research.mars import Drawn, Mars
from devplace.research.mlp import Mlp
from devplace.research.policies import bounded, entropy, log_prob, sample
from devplace.research.seq2seq import Seq2Seq


@dataclass(frozen=True)
class GrouperPlacer(Mars):
    """A grouper and a placer, learned together by PPO.

    Attributes:
        coarse_groups: Most groups that the grouper forms.
        grouper_entropy: Weight of the grouper's entropy against the placer's.
    """

    name: str = "grouper-placer"
    pretraining_steps: int = 0
    coarse_groups: int = 32
    grouper_entropy: float = 1.0

    def _policy(self, environment: Environment, device: torch.device) -> Any:
        return GrouperPolicy(self, environment, device).to(device)


class GrouperPolicy(nn.Module):
    """Feed-forward grouper and sequence-to-sequence placer.

    A row of choices is the coarse group of each of M units, then the device of each of G groups.
    """

    def __init__(
        self, placer: GrouperPlacer, environment: Environment, device: torch.device
    ) -> None:
        super().__init__()
        grouping = environment.grouping
        self.num_units = environment.num_groups
        self.num_coarse = min(placer.coarse_groups, self.num_units)
        self.units = torch.as_tensor(group_features(grouping)).to(device)
        self.adjacency = torch.as_tensor(group_adjacency(grouping)).to(device)
        own = self.units.shape[1] - 2 * self.num_units  # type counts and output shapes
        self.contents = self.units[:, :own]
        self.tanh_constant = placer.tanh_constant
        self.grouper_entropy = placer.grouper_entropy
        self.grouper = Mlp([self.units.shape[1], placer.encoder_hidden, self.num_coarse])
        self.placer = Seq2Seq(
            own + 2 * self.num_coarse,
            environment.num_actions,
            placer.hidden,
            placer.tanh_constant,
            temperature=1.0,
        )

    def grouping_logits(self) -> Tensor:
        """Of the coarse group of each unit. `[M, G]`"""
        return bounded(self.grouper(self.units), self.tanh_constant, 1.0)

    def coarse(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of coarse groups `[B, G, F]`, and which have members `[B, G]`.

        Type counts and output shapes summed over members, then edges to and from each group.

        Args:
            group: Of each unit. int64 `[B, M]`
        """
        member = nn.functional.one_hot(group, self.num_coarse).float().transpose(1, 2)
        contents = member @ self.contents
        edges = ((member @ self.adjacency @ member.transpose(1, 2)) > 0).float()
        contents = contents / (contents.amax(2, keepdim=True) + 1)
        return torch.cat([contents, edges, edges.transpose(1, 2)], 2), member.sum(2) > 0

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def draw(self, count: int, generator: torch.Generator) -> Drawn:
        """See `mars.Policy`."""
        logits = self.grouping_logits().expand(count, -1, -1)
        group = sample(logits, generator)
        embeddings, is_used = self.coarse(group)
        devices, from_logits = self.placer.act(embeddings, count, generator)
        weight = log_prob(from_logits, devices) * is_used
        return Drawn(
            devices.gather(1, group),
            torch.cat([group, devices], 1),
            torch.cat([log_prob(logits, group), weight], 1),
        )

    def weigh(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """See `mars.Policy`."""
        group, devices = choices[:, : self.num_units], choices[:, self.num_units :]
        embeddings, is_used = self.coarse(group)
        of_group, of_device = self.grouping_logits(), self.placer.logits(embeddings, devices)
        every = of_group.expand(len(choices), -1, -1)
        weight = log_prob(of_device, devices) * is_used
        spread = self.grouper_entropy * entropy(of_group).mean()
        spread = (spread + entropy(of_device)[is_used].mean()) / (1 + self.grouper_entropy)
        return torch.cat([log_prob(every, group), weight], 1), spread
