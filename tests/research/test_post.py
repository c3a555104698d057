"""Post's cross-entropy step, worked by hand."""

import numpy as np
import torch

from devplace.research.post import elite_shares, mixed


def test_the_cross_entropy_step_is_the_share_of_elites() -> None:
    """Of four placements of two groups on three devices the best two count: costs 1 and 2."""
    actions = torch.tensor([[0, 2], [1, 1], [0, 1], [2, 0]])
    costs = np.array([1.0, 4.0, 2.0, 3.0])
    shares = elite_shares(actions, costs, 0.5, torch.ones(2, 3, dtype=torch.bool))
    assert shares.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]


def test_the_step_is_mixed_with_the_uniform_distribution() -> None:
    """With u = 0.3, over the devices that a group may go to."""
    allowed = torch.tensor([[True, True, False]])
    found = mixed(torch.tensor([[1.0, 0.0, 0.0]]), allowed, 0.3)
    assert torch.allclose(found, torch.tensor([[0.85, 0.15, 0.0]]))
