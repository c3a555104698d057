"""Multi-layer perceptrons."""
# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class Mlp(nn.Module):
    """Linear layers with ReLU between them, none after the last.

    Args:
        sizes: Inputs, hidden layers, outputs.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., sizes[0]]` -> `[..., sizes[-1]]`"""
        outputs: Tensor = self.layers(inputs)
        return outputs
