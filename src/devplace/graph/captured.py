"""A captured step: its graph, and what is needed to run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from devplace.errors import InputError
from devplace.graph.graph import OpGraph
from devplace.graph.program import Program


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Captured(OpGraph):
    """A step as `capture` gives it: an `OpGraph` that can also be run.

    Planning needs the graph alone. Two are equal if their graphs are.

    Attributes:
        program: The FX graph, and the meaning of its inputs and outputs.
        model, optimizer, loss_fn: As given to `capture`; None in processes that only time ops.
    """

    program: Program = field(repr=False)
    model: Any = field(default=None, repr=False)
    optimizer: Any = field(default=None, repr=False)
    loss_fn: Any = field(default=None, repr=False)

    @cached_property
    def graph(self) -> OpGraph:
        """The graph as plain data."""
        return OpGraph(self.name, self.ops, self.tensors, self.results, self.meta)

    def __eq__(self, other: object) -> bool:
        return self.graph == (other.graph if isinstance(other, Captured) else other)

    __hash__ = None  # type: ignore[assignment]


def as_captured(graph: OpGraph, purpose: str) -> Captured:
    """The graph, which must be captured.

    Args:
        graph: Any graph.
        purpose: What it is needed for, as in "To run it".

    Raises:
        InputError: It is from a file, was made by hand, or is no graph at all.
    """
    if isinstance(graph, Captured):
        return graph
    is_graph = isinstance(graph, OpGraph)
    what = f"graph {graph.name!r} is data alone" if is_graph else f"got {type(graph).__name__}"
    raise InputError(
        f"{purpose}, a captured step is needed, and {what}. Capture the model, batch, loss and "
        "optimizer with dp.capture in this process, and give what it returns."
    )
