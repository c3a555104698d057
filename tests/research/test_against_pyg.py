"""Graph convolution and Deep Graph Infomax against PyTorch Geometric, where that is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from devplace.research.dgi import Discriminator, dgi_loss
from devplace.research.gcn import Gcn, normalised_edges

NODES, FEATURES, HIDDEN = 40, 7, 5


@pytest.fixture
def pyg() -> Any:
    """`torch_geometric.nn`."""
    pytest.importorskip("torch_geometric")
    import torch_geometric.nn

    return torch_geometric.nn


def graph(seed: int) -> tuple[Tensor, Tensor]:
    """Features and edges in one direction, some of them twice, in both directions, or loops."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, NODES, (2, 90), generator=generator)
    edges = torch.cat([edges, edges[:, :5], edges[:, 5:10].flip(0), torch.tensor([[3], [3]])], 1)
    return torch.randn(NODES, FEATURES, generator=generator), edges


@pytest.mark.parametrize("seed", range(5))
def test_a_layer_is_that_of_kipf_and_welling(pyg: Any, seed: int) -> None:
    """The same weights give the same embeddings and gradients as `GCNConv`."""
    nodes, edges = graph(seed)
    ours, theirs = Gcn(FEATURES, HIDDEN), pyg.GCNConv(FEATURES, HIDDEN)
    with torch.no_grad():
        ours.bias.normal_()
        theirs.lin.weight.copy_(ours.linear.weight)
        theirs.bias.copy_(ours.bias)
    apart = edges[:, edges[0] != edges[1]]
    both = torch.unique(torch.cat([apart, apart.flip(0)], 1), dim=1)
    here, there = ours(nodes, *normalised_edges(edges, NODES)), theirs(nodes, both)
    torch.testing.assert_close(here, there)
    weight = torch.randn(NODES, HIDDEN)
    (here * weight).sum().backward()
    (there * weight).sum().backward()
    torch.testing.assert_close(ours.linear.weight.grad, theirs.lin.weight.grad)


class _Encoder(nn.Module):
    """One layer on fixed edges."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.layer = Gcn(FEATURES, HIDDEN)
        self.edges = normalised_edges(edges, NODES)

    def forward(self, nodes: Tensor) -> Tensor:
        return torch.relu(self.layer(nodes, *self.edges))


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_that_of_deep_graph_infomax(pyg: Any, seed: int) -> None:
    """Theirs adds the means of real and corrupted nodes where the paper halves them."""
    nodes, edges = graph(seed)
    shuffled = nodes[torch.randperm(NODES, generator=torch.Generator().manual_seed(seed))]
    encoder, discriminator = _Encoder(edges), Discriminator(HIDDEN)
    theirs = pyg.DeepGraphInfomax(
        HIDDEN, encoder, lambda z, *_: torch.sigmoid(z.mean(0)), lambda _: shuffled
    )
    with torch.no_grad():
        theirs.weight.copy_(discriminator.weight)
    scores = discriminator(encoder(nodes), encoder(shuffled))
    expected = theirs.loss(encoder(nodes), encoder(shuffled), torch.sigmoid(encoder(nodes).mean(0)))
    torch.testing.assert_close(2 * dgi_loss(*scores), expected, rtol=1e-5, atol=1e-5)
