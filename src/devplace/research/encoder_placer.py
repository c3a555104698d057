"""The encoder-placer row of Mars's table: a graph encoder and a placer, learned jointly.

The slides do not say whose it is; chosen here: GDP's, the one published at the time. GraphSAGE with
max pooling embeds the ops (`encoders.SageEncoder`), a segment-recurrent Transformer gives the
devices of all groups at once (`segments.SegmentTransformer`); PPO as in `mars`.

Source: Zhou et al. (2019), GDP: generalized device placement for dataflow graphs, arXiv 1910.01578.

Differs from GDP in:

- Sizes, which were not found, are Mars's, tuned on nmt-4 for it.
- Groups of ops are placed, as in `mars`; there is no superposition of policies, as one graph is.
- A group's place in the topological order is added to its embedding, without which the like ops of
  two time steps are the same to the placer.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from devplace.research.encoders import SageEncoder, node_graph
from devplace.research.environment import Environment
from devplace.research.features import topological_positions
from devplace.research.mars import Drawn, Mars
from devplace.research.policies import entropy, log_prob, sample
from devplace.research.segments import SegmentTransformer


@dataclass(frozen=True)
class EncoderPlacer(Mars):
    """GraphSAGE and a Transformer, learned together by PPO, without pre-training."""

    name: str = "encoder-placer"
    pretraining_steps: int = 0

    def _policy(self, environment: Environment, device: torch.device) -> Any:
        return TransformerPolicy(self, environment, device).to(device)


class TransformerPolicy(nn.Module):
    """GraphSAGE over the ops, then attention over groups of them."""

    WAVES = 8

    def __init__(self, placer: Mars, environment: Environment, device: torch.device) -> None:
        super().__init__()
        self.graph = node_graph(environment.grouping, device)
        self.allowed = torch.as_tensor(environment.allowed).to(device)
        place = torch.as_tensor(topological_positions(environment.grouping), dtype=torch.float32)
        self.positions = waves(place, self.WAVES).to(device)
        features = self.graph.nodes.shape[1]
        self.encoder = SageEncoder(features, placer.encoder_hidden, placer.encoder_layers)
        self.placer = SegmentTransformer(
            placer.encoder_hidden + 2 * self.WAVES,
            environment.num_actions,
            placer.hidden,
            placer.segment,
            placer.tanh_constant,
        )

    def logits(self) -> Tensor:
        """Of all groups. `[M, A]`"""
        embeddings = self.graph.group_means(self.encoder(self.graph))
        found: Tensor = self.placer(torch.cat([embeddings, self.positions], 1), self.allowed)
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def draw(self, count: int, generator: torch.Generator) -> Drawn:
        """See `mars.Policy`."""
        logits = self.logits().expand(count, -1, -1)
        actions = sample(logits, generator)
        return Drawn(actions, actions, log_prob(logits, actions))

    def weigh(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """See `mars.Policy`."""
        logits = self.logits()
        every = logits.expand(len(choices), -1, -1)
        return log_prob(every, choices), entropy(logits).mean()


def waves(position: Tensor, count: int) -> Tensor:
    """Sines and cosines of positions between 0 and 1, each twice as fast. `[M]` -> `[M, 2 count]`

    Source: Vaswani et al. (2017), Attention is all you need, arXiv 1706.03762, section 3.5.
    """
    angle = torch.pi * position[:, None] * 2.0 ** torch.arange(count)
    return torch.cat([angle.sin(), angle.cos()], 1)
