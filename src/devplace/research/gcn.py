"""Graph convolution over sparse edges."""
# mypy: allow-subclassing-any

from __future__ import annotations

import torch
from torch import Tensor, nn


def normalised_edges(edges: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Both directions of each edge and a loop at each node, with weights `1 / sqrt(d_i d_j)`.

    Source: Kipf and Welling (2017), Semi-supervised classification with graph convolutional
    networks, arXiv 1609.02907, equation 2.

    Args:
        edges: int64 `[2, E]`, in one direction each.

    Returns:
        Edges `[2, E']` and weights `[E']`; an edge that was there in both directions counts once.
    """
    loops = torch.arange(num_nodes, device=edges.device).repeat(2, 1)
    apart = edges[:, edges[0] != edges[1]]
    both = torch.unique(torch.cat([apart, apart.flip(0)], 1), dim=1)
    every = torch.cat([both, loops], 1)
    degree = torch.bincount(every[1], minlength=num_nodes).to(torch.float32)
    return every, (degree[every[0]] * degree[every[1]]).rsqrt()


class Gcn(nn.Module):
    """One layer: `sum over neighbours of weight_ij (x_j W) + b`; the activation is the caller's.

    Args:
        inputs, outputs: Features per node.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.linear.weight)

    def forward(self, nodes: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
        """`[V, inputs]` -> `[V, outputs]`; edges and weights of `normalised_edges`."""
        features = self.linear(nodes)
        total = torch.zeros_like(features)
        total = total.index_add(0, edges[1], features[edges[0]] * weights[:, None])
        return total + self.bias
