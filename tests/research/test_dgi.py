"""Deep Graph Infomax and the graph encoders."""

from __future__ import annotations

import math

import torch

from devplace.research.dgi import (
    Discriminator,
    accuracy,
    corrupted,
    dgi_loss,
    pretrain,
    readout,
    scores,
)
from devplace.research.encoders import GcnEncoder, NodeGraph, SageEncoder, node_graph
from devplace.research.gcn import normalised_edges
from devplace.research.grouping import colocated
from tests.research.cases import layered


def graph(count: int = 9, features: int = 4) -> NodeGraph:
    """A random graph whose nodes are in three groups."""
    torch.manual_seed(0)
    edges, weights = normalised_edges(torch.randint(0, count, (2, 14)), count)
    return NodeGraph(torch.randn(count, features), edges, weights, torch.arange(count) % 3, 3)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + math.exp(-x))


def test_the_loss_is_the_papers_formula() -> None:
    """Equation 1 with loops over nodes and features, and the bilinear discriminator spelt out."""
    torch.manual_seed(0)
    real, fake, weight = torch.randn(5, 3), torch.randn(5, 3), torch.randn(3, 3)
    summary = [sigmoid(sum(row[k] for row in real.tolist()) / 5) for k in range(3)]
    total = 0.0
    for nodes, truth in ((real, 1), (fake, 0)):
        for row in nodes.tolist():
            score = sum(
                row[a] * float(weight[a, b]) * summary[b] for a in range(3) for b in range(3)
            )
            total -= math.log(sigmoid(score) if truth else 1 - sigmoid(score))
    found = dgi_loss(*(scores(nodes, readout(real), weight) for nodes in (real, fake)))
    assert math.isclose(float(found), total / 10, rel_tol=1e-5)


def test_corruption_shuffles_rows() -> None:
    """The rows of features are the same ones, elsewhere."""
    nodes = torch.arange(40.0).reshape(20, 2)
    shuffled = corrupted(nodes, torch.Generator().manual_seed(0))
    assert not torch.equal(shuffled, nodes)
    assert torch.equal(shuffled[shuffled[:, 0].argsort()], nodes)


def test_it_learns_to_tell_a_graph_from_its_corruption() -> None:
    """On a layered graph: near chance before, nine nodes in ten after, on fresh corruptions."""
    found = node_graph(colocated(layered(8)), torch.device("cpu"))
    torch.manual_seed(0)
    encoder, discriminator = GcnEncoder(found.nodes.shape[1], 16, 2), Discriminator(16)
    optimizer = torch.optim.Adam([*encoder.parameters(), *discriminator.parameters()], 0.01)
    generator = torch.Generator().manual_seed(0)

    def told() -> float:
        with torch.no_grad():
            fakes = [encoder(found, corrupted(found.nodes, generator)) for _ in range(10)]
            return sum(accuracy(*discriminator(encoder(found), fake)) for fake in fakes) / 10

    before = told()
    losses = pretrain(
        lambda nodes: encoder(found, nodes), discriminator, optimizer, found.nodes, 150, generator
    )
    assert before < 0.7
    assert told() > 0.9
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]


def test_pretraining_ends_in_time() -> None:
    """It stops when asked to, and when the loss no longer falls."""
    found = graph()
    encoder, discriminator = GcnEncoder(4, 8, 1), Discriminator(8)

    def losses(rate: float, **options: object) -> int:
        optimizer = torch.optim.SGD(encoder.parameters(), rate)
        generator = torch.Generator().manual_seed(0)
        return len(
            pretrain(
                lambda nodes: encoder(found, nodes),
                discriminator,
                optimizer,
                found.nodes,
                50,
                generator,
                **options,  # type: ignore[arg-type]
            )
        )

    assert losses(0.0, is_over=lambda: True) == 0
    assert losses(0.0, patience=3) < 50
    assert losses(0.0, patience=50) == 50


def test_the_encoder_is_dense_convolutions() -> None:
    """Two layers equal `prelu(S prelu(S X W1 + b1) W2 + b2)` with the dense matrix S."""
    found, count = graph(), 9
    dense = torch.eye(count)
    for a, b in found.edges.T.tolist():
        dense[a, b] = dense[b, a] = 1
    degree = dense.sum(1)
    dense = dense / (degree[:, None] * degree[None]).sqrt()
    encoder = GcnEncoder(4, 6, 2)
    expected = found.nodes
    for layer in encoder.layers:
        expected = dense @ expected @ layer.linear.weight.T + layer.bias
        expected = torch.where(expected > 0, expected, 0.25 * expected)
    assert torch.allclose(encoder(found), expected, atol=1e-6)


def test_max_pooling_over_neighbours() -> None:
    """GraphSAGE's layer equals a loop over nodes and their neighbours."""
    found = graph()
    encoder = SageEncoder(4, 6, 1)
    offered = torch.sigmoid(encoder.pools[0](found.nodes))
    rows = []
    for node in range(9):
        neighbours = found.edges[0][found.edges[1] == node]
        most = offered[neighbours].amax(0)
        rows.append(torch.relu(encoder.joins[0](torch.cat([found.nodes[node], most]))))
    assert torch.allclose(encoder(found), torch.stack(rows), atol=1e-6)


def test_groups_get_the_mean_of_their_nodes() -> None:
    """Nodes 0, 3 and 6 are group 0."""
    found = graph()
    means = found.group_means(found.nodes)
    assert torch.allclose(means[0], found.nodes[[0, 3, 6]].mean(0))
    assert means.shape == (3, 4)
