"""Fuse around pins, so that no group is split by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

from devplace.errors import GraphError
from devplace.graph.captured import Captured
from devplace.graph.fusion.fuse import fuse
from devplace.graph.graph import OpGraph
from devplace.graph.patterns import cut_by, pinned_part


@overload
def fuse_for(graph: Captured, pins: Mapping[str, str]) -> Captured: ...
@overload
def fuse_for(graph: OpGraph, pins: Mapping[str, str]) -> OpGraph: ...
def fuse_for(graph: OpGraph, pins: Mapping[str, str]) -> OpGraph:
    """A fused graph in which no group holds ops that pins send to different devices, or to none.

    Args:
        graph: A fused graph; one that is not fused is given back.
        pins: As of a `Problem`: pattern -> device name.

    Returns:
        The graph itself if the pins cut none of its groups; else the same step, fused again so that
        they do not.

    Raises:
        GraphError: A group is cut, and the step before it was fused is not known (of a graph from a
            file).
    """
    cut = next((op for op in graph.ops if op.members and cut_by(op, pins)), None)
    if cut is None:
        return graph
    if graph.plain is None:
        raise GraphError(
            f"Pins cut the fused group {cut.name!r}, and a fused graph from a file does not hold "
            f"the ops it was made of. Load or capture the plain step and fuse that: "
            f"fuse_for(fuse(graph), pins)."
        )
    return fuse(graph.plain, pinned_part(pins))
