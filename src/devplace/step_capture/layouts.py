"""Memory layouts of tensors where they decide the speed of kernels."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from devplace.step_capture.analysis import is_fusible, op_name, tensors_in, view_bases
from devplace.step_capture.strides import is_dense

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten

# Work on some layouts only; their fake kernels refuse others.
_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.view.dtype,
    aten.view_as_complex.default,
)
# Kernels of ops with a call of their own that take any layout, by parts of their names.
_TAKE_ANY = ("mm", "convolution", "pool", "upsample", "batch_norm")
# Compilers take any layout of these, PyTorch's kernels for GPUs do not.
_TAKE_CONTIGUOUS = ("native_group_norm", "native_group_norm_backward")


def propagate(graph: torch.fx.Graph, changed: Mapping[Node, Any]) -> None:
    """Work out anew what lies otherwise because these nodes do; what was a view may need a copy.

    Kernels may take for granted that inputs are contiguous, as the function around them saw to it
    when it was traced (norms of weights, distances). Those get contiguous copies of such inputs;
    only kernels that are known to take any layout read what lies otherwise.

    Args:
        graph: Nodes have fake values.
        changed: Nodes whose fake values have other strides than before -> the value before.
    """
    former = dict(changed)
    copies = _Copies(graph, former)
    for node in list(graph.nodes):
        if node.op != "call_function" or former.keys().isdisjoint(node.all_input_nodes):
            continue
        before = node.meta["val"]
        if node.target is aten.as_strided.default:
            copies.give_storage(node)
        elif not _takes_any_layout(node):
            copies.give_contiguous(node)
        try:
            value = fake_call(node)
        except (RuntimeError, ValueError):  # torch raises one or the other
            if node.target not in _VIEWS:
                raise
            copies.give_contiguous(node, always=True)
            value = fake_call(node)
        node.meta["val"] = value
        if _strides(value) != _strides(before):
            former[node] = before


def own_memory(graph: torch.fx.Graph) -> None:
    """Let `as_strided` read sources from copies: devices may hold theirs without the gaps."""
    copies = _Copies(graph, {})
    for node in list(graph.nodes):
        if node.target is aten.as_strided.default and owner(node).op != "call_function":
            copies.give_storage(node)


def counted(graph: torch.fx.Graph) -> set[Node]:
    """Nodes whose elements are counted in memory by `as_strided`."""
    return {owner(node) for node in graph.nodes if node.target is aten.as_strided.default}


def owner(node: Node) -> Node:
    """The node whose memory a view shows; of several outputs, the one."""
    while isinstance(base := next(iter(view_bases(node)), None), torch.fx.Node):
        if node.target is operator.getitem and not view_bases(base):
            break
        node = base
    return node


def _takes_any_layout(node: Node) -> bool:
    name = op_name(node)
    if view_bases(node):
        return True
    if is_fusible(node):
        return name not in _TAKE_CONTIGUOUS
    return any(part in name for part in _TAKE_ANY)


class _Copies:
    """Makes copies of what lies otherwise than before.

    Args:
        graph: The graph that is changed.
        former: Nodes that lie otherwise -> their fake values before.
    """

    def __init__(self, graph: torch.fx.Graph, former: Mapping[Node, Any]) -> None:
        self._graph = graph
        self._former = former

    def give_contiguous(self, node: Node, always: bool = False) -> None:
        """Give a call contiguous copies of the inputs that were contiguous, or of all."""
        for arg in node.all_input_nodes:
            value = self._former.get(arg)
            if not isinstance(value, torch.Tensor) or arg.meta["val"].is_contiguous():
                continue
            if always or value.is_contiguous():
                node.replace_input_with(arg, self._contiguous(node, arg))

    def give_storage(self, node: Node) -> None:
        """Give `as_strided`, which counts elements in memory, the whole memory as it was."""
        base: Any = node.args[0]
        value = self._former.get(base, base.meta["val"])
        offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
        size, stride = node.args[1:3]
        node.kwargs = {}
        copy = self._as_before(node, owner(base))
        node.args = (copy, size, stride, value.storage_offset() if offset is None else offset)

    def _as_before(self, node: Node, base: Node) -> Node:
        """A copy whose elements lie where they did."""
        value = self._former.get(base, base.meta["val"])
        for dim in (d for d, stride in enumerate(value.stride()) if stride == 0):
            base = self._call(node, aten.slice.Tensor, base, dim, 0, 1)
            value = value.narrow(dim, 0, 1)
        if not is_dense(value):
            shape, strides = list(value.shape), list(value.stride())
            empty = self._call(node, aten.new_empty_strided.default, base, shape, strides)
            return self._call(node, aten.copy.default, empty, base)
        order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
        turned = self._call(node, aten.permute.default, base, order)
        back = [order.index(dim) for dim in range(value.dim())]
        return self._call(node, aten.permute.default, self._contiguous(node, turned), back)

    def _contiguous(self, node: Node, arg: Node) -> Node:
        return self._call(node, aten.clone.default, arg, memory_format=torch.contiguous_format)

    def _call(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call right before a node."""
        with self._graph.inserting_before(node):
            return new_call(self._graph, node.meta["tag"], target, *args, **kwargs)


def new_call(graph: torch.fx.Graph, tag: Any, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call where the graph inserts, with its tag and fake value."""
    made = graph.call_function(target, args, kwargs)
    made.meta.update(tag=tag, val=fake_call(made))
    return made


def fake_call(node: Node) -> Any:
    """The fake value of a call from those of its inputs."""

    def value(arg: Node) -> Any:
        return arg.meta["val"]

    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    mode = next(t.fake_mode for n in node.all_input_nodes for t in tensors_in(n.meta["val"]))
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.stride()) for tensor in tensors_in(value)]
