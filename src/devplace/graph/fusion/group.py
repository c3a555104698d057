"""Records of a fused step: its groups and the ops that stay single."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """One group of a graph.

    Attributes:
        name: Name of its op.
        members: Its ops in topological order, views among them included.
        inputs: Tensors it reads, in the order of their first reader.
        outputs: Tensors of its members that others read.
        repeated: Members that other groups may compute as well.
    """

    name: str
    members: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    repeated: frozenset[int] = frozenset()


Unit = Group | int
"""A group, or an op that stays."""
