"""From rewards to what weighs log-probabilities: small pure functions.

In shapes, `B` is samples or episodes, `T` steps of an episode.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

F64 = NDArray[np.float64]


def scaled(advantage: F64) -> Tensor:
    """Divided by its root mean square, so that units do not matter; zeros stay. Any shape."""
    size = float(np.sqrt(np.mean(advantage**2))) if advantage.size else 0.0
    return torch.as_tensor(advantage / size if size else advantage, dtype=torch.float32)


def discounted(rewards: F64, discount: float) -> F64:
    """Returns `G_i = r_i + g G_i+1`. `[T, B]`"""
    returns = rewards.copy()
    for step in range(len(returns) - 2, -1, -1):
        returns[step] += discount * returns[step + 1]
    return returns
