"""Channels-last layout for convolutional nets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from devplace.step_capture.analysis import count_flops
from devplace.step_capture.layouts import propagate
from devplace.step_capture.request import Input

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten

MIN_CHANNELS = 16
MIN_SHARE = 0.9
"""Part of the flops of all convolutions that must be in such ones as gain (not grouped, images
with `MIN_CHANNELS` channels or more on one side). ResNet-50 on an H200 (torch 2.11, tf32): 12.9 ms
fused, 10.7 with channels last; grouped convolutions can be slower with them."""


def lay_channels_last(graph: torch.fx.Graph, inputs: Sequence[Input]) -> bool:
    """Lay weights of convolutions, their optimizer state and images channels last, if it pays.

    All that is computed from them follows; values stay the same. Sources are laid out once, when
    they are put on their devices.

    Args:
        graph: A clean graph, captured for a GPU.
        inputs: What its placeholders are.

    Returns:
        Whether it was done.
    """
    convolutions = [n for n in graph.nodes if n.target is aten.convolution.default]
    if not _pays(convolutions):
        return False
    placeholders = graph.find_nodes(op="placeholder")
    entries = dict(zip(placeholders, inputs, strict=True))
    read = {s for node in convolutions for arg in node.args[:2] for s in _sources(arg)}
    weights = {entries[node].key for node in read if entries[node].kind == "parameter"}
    changed = {}
    for node, entry in entries.items():
        is_weight = entry.kind in ("parameter", "state") and entry.key in weights
        if node.meta["val"].dim() == 4 and (is_weight or node in read):
            value = node.meta["val"]
            with value.fake_mode:
                node.meta["val"] = torch.empty_like(value, memory_format=torch.channels_last)
            changed[node] = value
    propagate(graph, changed)
    return True


def _pays(convolutions: Sequence[Node]) -> bool:
    flops = {node: count_flops(node) for node in convolutions}
    gaining = sum(count for node, count in flops.items() if _gains(node))
    return gaining > 0 and gaining >= MIN_SHARE * sum(flops.values())


def _gains(node: Node) -> bool:
    args: Any = node.args
    image, weight = args[0].meta["val"], args[1].meta["val"]
    is_fast = image.dtype != torch.float32 or torch.backends.cudnn.allow_tf32
    is_plain = args[8] == 1 and image.dim() == 4 and image.dtype != torch.float64
    return bool(is_fast and is_plain and max(weight.shape[:2]) >= MIN_CHANNELS)


def _sources(node: Any) -> Iterator[Node]:
    """The placeholder that an argument is, or is a cast of."""
    while node.target is aten._to_copy.default:
        node = node.args[0]
    if node.op == "placeholder":
        yield node
