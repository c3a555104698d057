"""HDP's embeddings: of ops for its Grouper, of groups under any grouping for its Placer."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devplace.research import features
from devplace.research.environment import Environment

F32 = NDArray[np.float32]


class OpEmbeddings:
    """Embeddings of ops and of groups of them. Ops that must share a device are one op here.

    In shapes, `G` is ops, `M` groups, `T` op types, `A` devices to choose from.

    Args:
        environment: Its groups are the ops.
        num_groups: M; groups may be empty.
        device: Where tensors live.

    Attributes:
        rows: Embeddings of ops: types; output sizes and number, neighbours, each column of these
            with mean 0 and deviation 1. `[G, T + 46]`
        op_allowed: Actions each op may take. bool `[G, A]`
    """

    def __init__(self, environment: Environment, num_groups: int, device: torch.device) -> None:
        grouping = environment.grouping
        problem = grouping.problem
        index, names = features.op_types(problem)
        types = features.group_sums(grouping, features.one_hot(index, len(names)))
        shapes = features.group_sums(grouping, np.maximum(features.output_shapes(problem), 0))
        outputs = features.group_sums(
            grouping, features.num_outputs(problem)[:, None].astype(float)
        )
        _, first = np.unique(grouping.of_task, return_index=True)
        neighbours = features.neighbour_table(problem)[first]
        neighbours[:, ::2] /= max(1, problem.core.tasks.num_tasks)
        sizes = np.concatenate([np.log1p(shapes), outputs, neighbours], axis=1)
        rows = np.concatenate([types, _scaled_columns(sizes)], axis=1)

        self.num_groups, self.num_actions = num_groups, environment.num_actions
        self.rows = torch.as_tensor(rows).to(device)
        self.op_allowed = torch.as_tensor(environment.allowed).to(device)
        self._counted = torch.as_tensor(np.concatenate([types, shapes], axis=1)).to(device)
        self._num_types = len(names)
        self._edges = torch.as_tensor(features.group_edges(grouping)[0]).to(device)
        self._is_free = bool(environment.allowed.all())

    @property
    def group_width(self) -> int:
        """Length of a group's embedding."""
        return int(self._counted.shape[1]) + 2 * self.num_groups

    def groups(self, grouping: Tensor) -> Tensor:
        """Type counts, summed output shapes, edges out of and into each group; as `group_features`.

        Args:
            grouping: Group of each op. int64 `[G]`

        Returns:
            `[1, M, T + 25 + 2 M]`
        """
        size = self.num_groups
        counted = self._counted.new_zeros(size, self._counted.shape[1])
        counted.index_add_(0, grouping, self._counted)
        adjacency = counted.new_zeros(size, size)
        adjacency[grouping[self._edges[0]], grouping[self._edges[1]]] = 1
        adjacency.fill_diagonal_(0)
        types, shapes = counted[:, : self._num_types], counted[:, self._num_types :]
        blocks = [types, shapes, adjacency, adjacency.T]
        scaled = [block / (block.amax(1, keepdim=True) + 1) for block in blocks]
        return torch.cat(scaled, 1)[None]

    def allowed(self, grouping: Tensor) -> Tensor | None:
        """Actions that all members may take; where there is none, those that any may; all for an
        empty group. bool `[M, A]`; None if every op may take every action."""
        if self._is_free:
            return None
        votes = torch.zeros(self.num_groups, self.num_actions, device=grouping.device)
        votes.index_add_(0, grouping, self.op_allowed.float())
        everyone = votes == torch.bincount(grouping, minlength=self.num_groups)[:, None]
        return torch.where(everyone.any(1, keepdim=True), everyone, votes > 0)


def _scaled_columns(rows: F32) -> F32:
    deviation = rows.std(axis=0)
    scaled = (rows - rows.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    found: F32 = scaled.astype(np.float32)
    return found
