"""Embeddings of the nodes of a graph, and of the groups they belong to.

In shapes, `V` is nodes (tasks), `E` edges, `F` features, `H` size of an embedding, `M` groups.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from devplace.research.features import one_hot, op_types, output_shapes
from devplace.research.gcn import Gcn, normalised_edges
from devplace.research.grouping import Grouping, task_edges


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """The graph as an encoder reads it.

    Attributes:
        nodes: Features of each task. `[V, F]`
        edges: Both directions of each edge, and loops. int64 `[2, E]`
        weights: `1 / sqrt(d_i d_j)`. `[E]`
        group: Group of each task. int64 `[V]`
        num_groups: M.
    """

    nodes: Tensor
    edges: Tensor
    weights: Tensor
    group: Tensor
    num_groups: int

    def group_means(self, embeddings: Tensor) -> Tensor:
        """Mean embedding of the nodes of each group. `[V, H]` -> `[M, H]`"""
        total = torch.zeros(self.num_groups, embeddings.shape[1], device=embeddings.device)
        count = torch.bincount(self.group, minlength=self.num_groups).clamp_min(1)
        return total.index_add(0, self.group, embeddings) / count[:, None]


def node_graph(grouping: Grouping, device: torch.device) -> NodeGraph:
    """Op type (one-hot) and output sizes (log scale) of each task, and who reads whom."""
    problem = grouping.problem
    index, names = op_types(problem)
    shapes = np.log1p(np.maximum(output_shapes(problem), 0)) / 10
    nodes = np.concatenate([one_hot(index, len(names)), shapes], axis=1)
    edges, weights = normalised_edges(torch.as_tensor(task_edges(problem)), len(nodes))
    return NodeGraph(
        torch.as_tensor(nodes, dtype=torch.float32).to(device),
        edges.to(device),
        weights.to(device),
        torch.as_tensor(grouping.of_task, dtype=torch.int64).to(device),
        grouping.num_groups,
    )


class GcnEncoder(nn.Module):
    """Graph convolutions with PReLU after each.

    Args:
        features: F.
        hidden: H.
        layers: Number of convolutions.
    """

    def __init__(self, features: int, hidden: int, layers: int) -> None:
        super().__init__()
        sizes = [features] + [hidden] * layers
        self.layers = nn.ModuleList(Gcn(a, b) for a, b in itertools.pairwise(sizes))
        self.activations = nn.ModuleList(nn.PReLU() for _ in self.layers)

    def forward(self, graph: NodeGraph, nodes: Tensor | None = None) -> Tensor:
        """Embeddings `[V, H]` of the graph's nodes, or of other features on its edges."""
        found = graph.nodes if nodes is None else nodes
        for layer, activation in zip(self.layers, self.activations, strict=True):
            found = activation(layer(found, graph.edges, graph.weights))
        return found


class SageEncoder(nn.Module):
    """GraphSAGE with max pooling: `h' = relu(W [h; max over neighbours of sigmoid(U h + b)])`.

    Source: Hamilton et al. (2017), Inductive representation learning on large graphs, NeurIPS, in
    the form of GDP: Zhou et al. (2019), arXiv 1910.01578.

    Args:
        features: F.
        hidden: H.
        layers: Number of rounds.
    """

    def __init__(self, features: int, hidden: int, layers: int) -> None:
        super().__init__()
        sizes = [features] + [hidden] * layers
        self.pools = nn.ModuleList(nn.Linear(size, hidden) for size in sizes[:-1])
        self.joins = nn.ModuleList(nn.Linear(size + hidden, hidden) for size in sizes[:-1])

    def forward(self, graph: NodeGraph) -> Tensor:
        """Embeddings `[V, H]`; a node counts as its own neighbour."""
        found = graph.nodes
        src, dst = graph.edges
        for pool, join in zip(self.pools, self.joins, strict=True):
            offered = torch.sigmoid(pool(found))
            index = dst[:, None].expand(-1, offered.shape[1])
            most = torch.zeros_like(offered).scatter_reduce(0, index, offered[src], "amax")
            found = torch.relu(join(torch.cat([found, most], 1)))
        return found
