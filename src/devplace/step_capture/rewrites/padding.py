"""Products whose dimensions fill no whole rows of 16 bytes, made with zeros beside them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from devplace.step_capture.layouts import new_call, propagate

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten

ALIGNMENT = 16
"""Bytes that rows must be multiples of for the fast kernels of matrix products."""
MIN_MULTIPLICATIONS = 2**30
"""Smaller products gain less than their copies cost. On an H200 (torch 2.11, bfloat16) products of
8192 x 1024 with a vocabulary of 50257 take 8.8, 6.1 and 5.7 ms (output, its gradients by input and
by weight), and 1.05, 0.91 and 1.13 ms with 50264."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pad_products(graph: torch.fx.Graph) -> None:
    """Pad large matrix products with zeros to whole rows; what is read of them stays the same.

    A dimension is padded if it is the one along which some operand or the output is contiguous.

    Args:
        graph: A clean graph, captured for a GPU.
    """
    pads = _Pads(graph)
    products = [node for node in graph.nodes if _is_product(node)]
    changed = {pads.pad(node): node.meta["val"] for node in products}
    propagate(graph, {node: value for node, value in changed.items() if node is not None})


def _is_product(node: Node) -> bool:
    return node.target in (aten.mm.default, aten.addmm.default) and not (
        node.kwargs.keys() & {"beta", "alpha"}
    )


class _Pads:
    """Makes padded operands, each once."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[Node, int, int], Node] = {}

    def pad(self, node: Node) -> Node | None:
        """Pad a product; gives what stands for it then, None if it stays."""
        *bias, left, right = node.args
        a, b = left.meta["val"], right.meta["val"]
        sizes = (a.shape[0], a.shape[1], b.shape[1])
        if a.dtype not in _DTYPES or sizes[0] * sizes[1] * sizes[2] < MIN_MULTIPLICATIONS:
            return None
        step = ALIGNMENT // a.element_size()
        rows, inner, columns = (-size % step for size in sizes)
        if a.stride(0) != 1:
            rows = 0
        if not (rows or inner or columns):
            return None
        with self._graph.inserting_before(node):
            operands = [
                self._operand(node, left, rows, inner),
                self._operand(node, right, inner, columns),
            ]
            bias = [self._bias(node, each, rows, columns) for each in bias]
            made = self._call(node, node.target, *bias, *operands)
            for dim, (padded, size) in enumerate(((rows, sizes[0]), (columns, sizes[2]))):
                if padded:
                    made = self._call(node, aten.slice.Tensor, made, dim, 0, size)
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)
        return made

    def _operand(self, product: Node, node: Node, rows: int, columns: int) -> Node:
        if not (rows or columns):
            return node
        if node.target is aten.t.default:
            whole: Any = node.args[0]
            return self._call(product, aten.t.default, self._operand(product, whole, columns, rows))
        key = (node, rows, columns)
        if key not in self._made:
            after = (
                node if node.op != "placeholder" else self._graph.find_nodes(op="placeholder")[-1]
            )
            with self._graph.inserting_after(after):
                pads = [0, columns, 0, rows]
                self._made[key] = self._call(product, aten.constant_pad_nd.default, node, pads)
        return self._made[key]

    def _bias(self, product: Node, node: Node, rows: int, columns: int) -> Node:
        """What is added, padded along the dimensions that are not repeated."""
        shape, whole = node.meta["val"].shape, product.meta["val"].shape
        pads: list[int] = []
        for dim, count in ((-1, columns), (-2, rows))[: len(shape)]:
            pads += [0, count if shape[dim] == whole[dim] else 0]
        if not any(pads):
            return node
        return self._call(product, aten.constant_pad_nd.default, node, pads)

    def _call(self, like: Node, target: Any, *args: Any) -> Node:
        return new_call(self._graph, like.meta["tag"], target, *args)
