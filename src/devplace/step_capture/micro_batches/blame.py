"""Find the op whose micro-batch values are not parts of its whole-batch value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from devplace.step_capture.analysis import tensors_in, view_bases
from devplace.step_capture.micro_batches.double_precision import NotEvaluatedError, evaluate
from devplace.step_capture.tags import describe_place

Node: TypeAlias = torch.fx.Node
ValueOf: TypeAlias = Callable[[int], torch.Tensor]
_LIMIT = 1e-9
"""Largest difference as a share of the largest magnitude; values have double precision."""


class Difference(NamedTuple):
    """The first op that differs.

    Attributes:
        op: Such as `aten.constant_pad_nd.default`.
        place: Module and source line.
        inputs: Names of the inputs it is computed from.
        place_in_order: How many ops before it give the same.
    """

    op: str
    place: str
    inputs: list[str]
    place_in_order: int


def first_difference(
    whole: torch.fx.GraphModule,
    chunks: torch.fx.GraphModule,
    sizes: Sequence[int],
    value_of: ValueOf,
    value_of_chunks: ValueOf,
    device: torch.device,
    names: Sequence[str],
) -> Difference | None:
    """The first op of the forward pass whose values in micro-batches are not those of the whole.

    They are if they are its rows, or all the same, or if their sum or mean over rows is the same.

    Args:
        whole, chunks: Graphs of the step.
        sizes: Rows per micro-batch.
        value_of, value_of_chunks: Place of an input -> its value.
        device: Where to compute.
        names: Name of each input that is one of the batch, else empty.
    """
    mine = _pairs(whole, chunks, len(sizes))
    kept: dict[Node, Any] = dict.fromkeys(n for pair in mine for n in (pair[0], *pair[1]))
    try:
        evaluate(whole, value_of, device, kept)
        evaluate(chunks, value_of_chunks, device, kept)
    except NotEvaluatedError:
        return None
    places = chunks.graph.find_nodes(op="placeholder")
    named = dict(zip(places, names, strict=True))
    for index, (node, parts) in enumerate(mine):
        values = [tensors_in(kept[part]) for part in parts]
        for k, theirs in enumerate(tensors_in(kept[node])):
            if not agrees(theirs, [value[k] for value in values], sizes):
                tag = node.meta["tag"]
                read = _inputs(parts[0], named)
                where = describe_place(tag.module, tag.line)
                return Difference(str(node.target), where, read, index)
    return None


def _pairs(
    whole: torch.fx.GraphModule, chunks: torch.fx.GraphModule, count: int
) -> list[tuple[Node, list[Node]]]:
    """Forward ops of the whole batch, each with its like in every micro-batch."""
    theirs = _forward(whole, -1) or _forward(whole, 0)
    partners: dict[Node, list[Node]] = {node: [] for node in theirs}
    for index in range(count):
        mine = _forward(chunks, index)
        kinds = [[(n.target, n.meta["tag"].module) for n in nodes] for nodes in (theirs, mine)]
        matcher = difflib.SequenceMatcher(None, kinds[0], kinds[1], autojunk=False)
        blocks = [(0, 0, len(mine))] if kinds[0] == kinds[1] else matcher.get_matching_blocks()
        for first, second, length in blocks:
            for k in range(length):
                partners[theirs[first + k]].append(mine[second + k])
    return [(node, parts) for node, parts in partners.items() if len(parts) == count]


def _forward(gm: torch.fx.GraphModule, micro_batch: int) -> list[Node]:
    """Ops of the forward pass of a micro-batch that make something."""
    return [
        node
        for node in gm.graph.nodes
        if node.op == "call_function"
        and node.meta["tag"].stage == "forward"
        and node.meta["tag"].micro_batch == micro_batch
        and not view_bases(node)
    ]


def agrees(whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether micro-batches have the rows of a value of the whole batch, or all of it, or what adds
    up to it or has its mean.

    Args:
        whole: Of any shape; rows may be in any dimension, together with others.
        parts: One for each micro-batch.
        sizes: Rows per micro-batch.
    """
    if all(part.shape == whole.shape for part in parts):
        if all(_is_close(part, whole) for part in parts):
            return True
        summed = torch.stack(list(parts)).sum(0)
        shares = [size / sum(sizes) for size in sizes]
        mean = sum(part * share for part, share in zip(parts, shares, strict=True))
        return _is_close(summed, whole) or _is_close(torch.as_tensor(mean), whole)
    return any(_have_rows(whole, parts, sizes, dim) for dim in range(whole.ndim))


def _have_rows(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int
) -> bool:
    rows, length = sum(sizes), whole.shape[dim]
    if length % rows or any(part.ndim != whole.ndim for part in parts):
        return False
    for outer in (k for k in range(1, length // rows + 1) if length // rows % k == 0):
        inner = length // rows // outer
        shapes = [(*t.shape[:dim], outer, -1, inner, *t.shape[dim + 1 :]) for t in parts]
        if any(t.numel() != whole.numel() // rows * n for t, n in zip(parts, sizes, strict=True)):
            return False
        pieces = [t.reshape(shape) for t, shape in zip(parts, shapes, strict=True)]
        if all(p.shape[dim + 1] == n for p, n in zip(pieces, sizes, strict=True)):
            joined = torch.cat(pieces, dim + 1)
            if joined.numel() == whole.numel() and _is_close(joined.reshape(whole.shape), whole):
                return True
    return False


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return False
    same = (one == other) | (one.isnan() & other.isnan())
    largest = float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return bool(((one - other).abs()[~same] <= _LIMIT * largest).all())


def _inputs(node: Node, named: dict[Node, str]) -> list[str]:
    """Names of the inputs that a node is computed from."""
    read = ancestors(node)
    return [name for each, name in named.items() if name and each in read]


def ancestors(node: Node) -> set[Node]:
    """A node and all it is computed from."""
    todo, seen = [node], {node}
    while todo:
        for each in todo.pop().all_input_nodes:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return seen
