"""One product for many small ones with the same weight, as in unrolled recurrent nets.

A recurrent layer multiplies its input of every time step by the same weight. Where all inputs are
there before the layer begins, one product of all rows does the same work several times as fast:
that reads the weight once, and fills a GPU. cuDNN does so for its own recurrent layers (Appleyard,
Kocisky, Blunsom 2016, Optimizing Performance of Recurrent Neural Networks on GPUs, section 3.1).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from devplace.step_capture.layouts import new_call
from devplace.step_capture.rewrites.stacking import after

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten

LAUNCH_NS = 3_500
BYTES_PER_NS = 4_000
FLOPS_PER_NS = 400_000
"""A product or copy takes a launch, and the longer of its memory traffic and its arithmetic. These
are for numbers of 4 bytes; of 2 bytes it is twice as many a second. On an H200 (torch 2.11, tf32),
64 x 1024 times 1024 x 4096 takes 8.0 us within a step; at the rate of large products, 400 TFLOP/s,
it would take 1.3 us."""
MARGIN = 1.5
"""Joined products must be faster by this factor, for what they read and make is kept longer, and
they can no longer be on different devices."""


class _Joined(NamedTuple):
    """How products are made one.

    Attributes:
        products: In the order of their rows.
        dim: 0 if the rows of a product lie together, 1 if those of all products take turns.
        base: Of which the left operands are all parts along `dim`, in order; else they are copied.
    """

    products: Sequence[Node]
    dim: int
    base: Node | None = None


def stack_inputs(graph: torch.fx.Graph) -> int:
    """Make one product of products with the same right operand, where that is faster.

    They must be of one module, stage and micro-batch, of one shape, and none may depend on another.
    A recurrent layer then begins when the one before has done all time steps; on several devices,
    layers can no longer run side by side. Results are views of the one product. What is no longer
    used stays in the graph.

    Args:
        graph: A clean graph, with `val` and `tag` of every node.

    Returns:
        How many products there are fewer.

    Complexity: O(V + E) and for each weight that of the part of the graph between its products.
    """
    spared = 0
    for products in _groups(graph):
        for level in _levels(products):
            joined = _joined(sorted(level))
            if len(level) > 1 and _pays(joined):
                _join(graph, joined)
                spared += len(level) - 1
    return spared


def _levels(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes by how many others of them lie on the longest path up to each.

    Nodes of one level do not depend on each other, and what depends on a node is of a later level.
    So sets of nodes, each within a level, can be contracted all at once without making a cycle.

    Args:
        nodes: Nodes of one graph.

    Complexity: O(V + E) of the part of the graph between the first and the last of them.
    """
    found: dict[int, list[Node]] = defaultdict(list)
    wanted = set(nodes)
    height: dict[Node, int] = {}
    node, last = min(nodes), max(nodes)
    while True:
        level = max((height.get(each, 0) for each in node.all_input_nodes), default=0)
        if node in wanted:
            found[level].append(node)
            level += 1
        if level:
            height[node] = level
        if node is last:
            return [found[level] for level in sorted(found)]
        node = node.next


def _groups(graph: torch.fx.Graph) -> list[list[Node]]:
    """Products that differ in nothing but the values of their left operands."""
    found: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target not in (aten.mm.default, aten.addmm.default):
            continue
        *bias, left, right = node.args
        if any(each.meta["val"].dim() > 1 for each in bias):
            continue
        tag, shape = node.meta["tag"], tuple(left.meta["val"].shape)
        options = tuple(sorted(node.kwargs.items()))
        place = (tag.stage, tag.module, tag.micro_batch)
        found[node.target, *bias, right, shape, options, place].append(node)
    return [products for products in found.values() if len(products) > 1]


def _pays(joined: _Joined) -> bool:
    """Whether one product, with the copy of what it reads, is faster by `MARGIN`."""
    count, left = len(joined.products), _left(joined.products[0]).meta["val"]
    (rows, inner), columns = left.shape, joined.products[0].meta["val"].shape[1]
    size = left.element_size()
    joined_ns = _product_ns(count * rows, inner, columns, size)
    if joined.base is None:
        joined_ns += LAUNCH_NS + 2 * count * rows * inner * size / BYTES_PER_NS
    return MARGIN * joined_ns <= count * _product_ns(rows, inner, columns, size)


def _product_ns(rows: int, inner: int, columns: int, size: int) -> float:
    """Time of a product on a large GPU, in nanoseconds; `size` is that of a number in bytes."""
    moved = size * (rows * inner + inner * columns + rows * columns)
    flops = 2 * rows * inner * columns
    return LAUNCH_NS + max(moved / BYTES_PER_NS, flops * size / (4 * FLOPS_PER_NS))


def _left(product: Node) -> Node:
    left: Any = product.args[-2]
    return left


def _joined(products: Sequence[Node]) -> _Joined:
    """The order of rows that copies least: of what is read, else of what reads, else the graph's.

    In the order of the graph, what is stacked may be there already, for the weight's gradient.
    """
    parts = [_part(_left(product)) for product in products]
    base, dim = parts[0][:2] if parts[0] else (None, 0)
    if base is not None and all(part and part[:2] == (base, dim) for part in parts):
        placed = {part[2]: product for part, product in zip(parts, products, strict=True) if part}
        if len(placed) == len(products) == base.meta["val"].shape[dim] and _is_flat(base):
            return _Joined([placed[k] for k in sorted(placed)], dim, base)
    is_larger = products[0].meta["val"].numel() > _left(products[0]).meta["val"].numel()
    for reader in products[0].users:
        dims = [dim for dim in range(1 + is_larger) if _is_stack(reader, dim)]
        read: Any = reader.args[0] if dims else ()
        if len(read) == len(products) and set(read) == set(products):
            return _Joined(read, dims[0])
    return _Joined(products, 0)


def _part(node: Node) -> tuple[Node, int, int] | None:
    """Base, dimension (0 or 1) and index of a matrix that is one of those of a larger tensor."""
    call: Any = node
    if node.target is operator.getitem:
        call = node.args[0]
        if call.target is not aten.unbind.int:
            return None
        index = node.args[1]
    elif node.target is aten.select.int:
        index = node.args[2]
    else:
        return None
    base = call.args[0]
    dim = _dim(call, 1, base.meta["val"].dim())
    return (base, dim, index % base.meta["val"].shape[dim]) if dim < 2 else None


def _dim(node: Node, position: int, dims: int) -> int:
    """A call's argument `dim`, 0 if it is not given."""
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(given) % dims


def _is_flat(base: Node) -> bool:
    """Whether the first two dimensions of a tensor can be one without a copy."""
    value = base.meta["val"]
    return bool(value.stride(0) == value.shape[1] * value.stride(1))


def _join(graph: torch.fx.Graph, joined: _Joined) -> None:
    """Make one product, and let its parts stand for the others."""
    products, dim = joined.products, joined.dim
    first = products[0]
    tag = min((product.meta["tag"] for product in products), key=lambda tag: tag.call)
    count, (rows, columns) = len(products), first.meta["val"].shape
    inner = _left(first).meta["val"].shape[1]
    reads = [joined.base] if joined.base else [_left(product) for product in products]
    *bias, _, right = first.args
    needed: list[Any] = [*reads, *bias, right]
    late = list(_late(products, max(needed)))
    with after(graph, *needed):
        if joined.base is None and dim == 0:
            left = new_call(graph, tag, aten.cat.default, reads)
        else:
            whole = joined.base or new_call(graph, tag, aten.stack.default, reads, dim)
            left = new_call(graph, tag, aten.view.default, whole, [count * rows, inner])
        made = new_call(graph, tag, first.target, *bias, left, right, **first.kwargs)
        shape = [rows, count, columns] if dim else [count, rows, columns]
        whole = new_call(graph, tag, aten.view.default, made, shape)
        parts = [
            new_call(graph, product.meta["tag"], aten.select.int, whole, dim, index)
            for index, product in enumerate(products)
        ]
    last = parts[-1]
    for node in late:
        last.append(node)
        last = node
    for product, part in zip(products, parts, strict=True):
        product.replace_all_uses_with(part)
        graph.erase_node(product)
    _spare_stacks(graph, whole, parts, dim)


def _late(products: Sequence[Node], last: Node) -> Iterator[Node]:
    """Nodes up to `last` that depend on products, in order: they must come after it."""
    found = set(products)
    node = min(products)
    while node < last:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
            yield node
        node = node.next


def _spare_stacks(graph: torch.fx.Graph, whole: Node, parts: Sequence[Node], dim: int) -> None:
    """Read the whole where all its parts are stacked again."""
    for reader in list(parts[0].users):
        read: Any = reader.args[0]
        if _is_stack(reader, dim) and list(read) == list(parts):
            reader.replace_all_uses_with(whole)
            graph.erase_node(reader)


def _is_stack(node: Node, dim: int) -> bool:
    """Whether a node stacks matrices along a dimension."""
    return node.target is aten.stack.default and _dim(node, 1, 3) == dim
