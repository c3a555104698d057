"""Deep Graph Infomax: pre-training of a graph encoder without labels, as pure functions.

Node embeddings h of the graph are to be told from those of a corrupted graph by how well each fits
the summary s of the whole graph:

    s = sigmoid(mean_i h_i),   D(h, s) = h W s,
    loss = -1 / 2 V sum_i [ log sigmoid(D(h_i, s)) + log(1 - sigmoid(D(h~_i, s))) ],

where h~ are the embeddings of the same edges with the rows of node features shuffled. In shapes,
`V` is nodes, `F` features, `H` size of an embedding.

Source: Velickovic et al. (2019), Deep graph infomax, ICLR, arXiv 1809.10341, equations 1, 3 and 4.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Encode = Callable[[Tensor], Tensor]
"""Embeddings of nodes with given features: `[V, F]` -> `[V, H]`."""


def corrupted(nodes: Tensor, generator: torch.Generator) -> Tensor:
    """The same rows of features on other nodes. `[V, F]`"""
    return nodes[torch.randperm(len(nodes), generator=generator).to(nodes.device)]


def readout(embeddings: Tensor) -> Tensor:
    """Summary of a graph: sigmoid of the mean. `[V, H]` -> `[H]`"""
    return torch.sigmoid(embeddings.mean(0))


def scores(embeddings: Tensor, summary: Tensor, weight: Tensor) -> Tensor:
    """`h W s`: how well each node fits the summary. `[V, H]`, `[H]`, `[H, H]` -> `[V]`"""
    return embeddings @ (weight @ summary)


def dgi_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Binary cross-entropy of scores of real and of corrupted nodes. `[V]`, `[V]`"""
    both = torch.cat([real, fake])
    truth = torch.cat([torch.ones_like(real), torch.zeros_like(fake)])
    return nn.functional.binary_cross_entropy_with_logits(both, truth)


def accuracy(real: Tensor, fake: Tensor) -> float:
    """Share of nodes that scores tell right. `[V]`, `[V]`"""
    return (float((real > 0).float().mean()) + float((fake <= 0).float().mean())) / 2


class Discriminator(nn.Module):
    """The matrix W of `scores`. `[H, H]`"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, size))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of real and of corrupted nodes, both against the summary of the real ones."""
        summary = readout(real)
        return scores(real, summary, self.weight), scores(fake, summary, self.weight)


def pretrain(
    encode: Encode,
    discriminator: Discriminator,
    optimizer: torch.optim.Optimizer,
    nodes: Tensor,
    steps: int,
    generator: torch.Generator,
    patience: int = 20,
    is_over: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Gradient steps on `dgi_loss`, each with a new corruption; gives the losses.

    Args:
        encode: The encoder on the edges of the graph.
        optimizer: Of encoder and discriminator.
        nodes: `[V, F]`
        steps: Most of them.
        patience: Ends after this many steps without a lower loss.
        is_over: Asked before each step whether to end.
    """
    losses: list[float] = []
    best = 0
    while len(losses) < steps and not is_over():
        loss = dgi_loss(*discriminator(encode(nodes), encode(corrupted(nodes, generator))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if losses[-1] < losses[best]:
            best = len(losses) - 1
        if len(losses) - 1 - best >= patience:
            break
    return losses
