"""The callable that the FX node of a fused group refers to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from devplace.graph.fx_data import NodeData, graph_from_data, nodes_as_data

Pairs = tuple[tuple[int, int], ...]
"""(output, input) of a group."""


class FusedCall:
    """The ops of a group as one function of its inputs.

    Called as it is, it runs its members one by one with PyTorch's kernels. Two that have the same
    name compute the same.

    Args:
        graph: Placeholders for the inputs, calls, and one output node with a tuple of outputs.
        over: (output, input) pairs: the output replaces the input, so its kernel may write it over
            that where nothing else reads the old value.

    Attributes:
        graph: As given; views in it are calls that work in any layout.
        over: As given.
        name: Made of what it calls.
    """

    def __init__(self, graph: torch.fx.Graph, over: Pairs = ()) -> None:
        self.graph = graph
        self.over = over
        self.name = f"fused_{_digest(nodes_as_data(graph), over)}"
        self._functions: dict[Any, Callable[..., tuple[Any, ...]]] = {}

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return _from_data, (nodes_as_data(self.graph), self.over)

    @property
    def num_outputs(self) -> int:
        """Tensors it gives."""
        return len(outputs_of(self.graph))

    def __call__(self, *tensors: Any) -> Any:
        """Run the members one by one.

        Returns:
            The tensor, or a tuple if there are several.
        """
        device = tensors[0].device
        function = self._functions.get(device)
        if function is None:
            module = torch.fx.GraphModule({}, on_device(self.graph, device))
            function = self._functions[device] = module.forward
        return one_or_all(function(*tensors))


def one_or_all(made: Sequence[Any]) -> Any:
    """The only value of a sequence, or all of several as a tuple."""
    return made[0] if len(made) == 1 else tuple(made)


def outputs_of(graph: torch.fx.Graph) -> tuple[Any, ...]:
    """The nodes that a graph gives."""
    output: Any = next(node for node in reversed(graph.nodes) if node.op == "output")
    return tuple(output.args[0])


def on_device(graph: torch.fx.Graph, device: Any) -> torch.fx.Graph:
    """A copy of a graph that makes its constants on a device."""
    copied = torch.fx.Graph()
    values: dict[Any, Any] = {}

    def placed(arg: Any) -> Any:
        return device if isinstance(arg, torch.device) else arg

    for node in graph.nodes:
        made = copied.node_copy(node, lambda other: values[other])
        made.args = torch.fx.node.map_aggregate(made.args, placed)
        made.kwargs = torch.fx.node.map_aggregate(made.kwargs, placed)
        values[node] = made
    return copied


def _from_data(nodes: list[NodeData], over: Pairs) -> FusedCall:
    return FusedCall(graph_from_data(nodes), over)


def _digest(nodes: Sequence[NodeData], over: Pairs) -> str:
    rows: list[Any] = [over] if over else []
    rows += [  # names of inputs do not count
        (kind, target if kind == "call_function" else "", args, kwargs)
        for kind, _, target, args, kwargs in nodes
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
