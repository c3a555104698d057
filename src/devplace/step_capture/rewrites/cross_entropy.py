"""Cross entropy over many classes: its gradient without a pass of its own, and whole rows.

The gradient of a row is `(softmax - one_hot) * g`; as traced it is a sum over a row that holds one
number, taken from a scattered tensor. And where the product before it was padded (`padding.py`), a
kernel that reads only the classes there are loads numbers one by one, as their count is no multiple
of what is loaded at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from devplace.step_capture.layouts import new_call

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten
_MEAN = 1  # of at::Reduction
_PASSED = (aten.view.default, aten._unsafe_view.default, aten._to_copy.default)


def direct_cross_entropy(graph: torch.fx.Graph) -> None:
    """Compute gradients of cross entropy directly, over whole rows where these are padded.

    When ops run one by one, values are the same but for the last bit of an exponential, which the
    kernel of the gradient and that of `exp` can round differently.

    Args:
        graph: A clean graph, its products padded.
    """
    for node in list(graph.nodes):
        if node.target is aten._log_softmax_backward_data.default and _is_cross_entropy(node):
            _Loss(graph, node).rewrite()


def _is_cross_entropy(node: Node) -> bool:
    grad, log_softmax, dim, _ = node.args
    scattered = _uncast(grad)
    return (
        scattered.target is aten.nll_loss_backward.default
        and _uncast(scattered.args[1]) is log_softmax
        and log_softmax.target is aten._log_softmax.default
        and scattered.args[3] is None
        and log_softmax.meta["val"].dim() == 2
        and dim in (1, -1)
    )


def _uncast(node: Any) -> Node:
    """What a cast, as under autocast, is made of."""
    while node.target is aten._to_copy.default:
        node = node.args[0]
    found: Node = node
    return found


class _Loss:
    """One cross entropy of a step.

    Args:
        graph: The step.
        node: Its gradient by what the softmax is taken of.
    """

    def __init__(self, graph: torch.fx.Graph, node: Node) -> None:
        self._graph = graph
        self._node = node
        self._scattered: Any = _uncast(node.args[0])
        self._grad_dtype = node.args[0].meta["val"].dtype
        self._log_softmax: Any = node.args[1]
        self._count = int(self._log_softmax.meta["val"].shape[1])

    def rewrite(self) -> None:
        """Put the direct gradient in the place of the traced one."""
        width = self._widen()
        with self._graph.inserting_before(self._node):
            made = self._gradient()
            if width is not None:
                self._replace_pads(made, width)
                made = self._call(self._node, aten.slice.Tensor, made, 1, 0, self._count)
        self._node.replace_all_uses_with(made)
        self._graph.erase_node(self._node)

    def _gradient(self) -> Node:
        """`exp(log_softmax) * g - one_hot * g`."""
        grad, _, target, _, reduction, ignored, total = self._scattered.args
        like = self._node
        target = self._call(like, aten.unsqueeze.default, target, 1)
        if reduction == _MEAN:
            grad = self._call(like, aten.div.Tensor, grad, total)
        elif grad.meta["val"].dim():
            grad = self._call(like, aten.unsqueeze.default, grad, 1)
        is_counted = self._call(like, aten.ne.Scalar, target, ignored)
        column = self._call(like, aten.where.ScalarOther, is_counted, grad, 0.0)
        exact = column.meta["val"].dtype
        column = self._cast(like, self._cast(like, column, self._grad_dtype), exact)
        classes = self._classes(like, self._log_softmax)
        is_target = self._call(like, aten.eq.Tensor, classes, target)
        hit = self._call(like, aten.where.ScalarOther, is_target, column, 0.0)
        softmax = self._call(like, aten.exp.default, self._cast(like, self._log_softmax, exact))
        scaled = self._call(like, aten.mul.Tensor, softmax, column)
        made = self._call(like, aten.sub.Tensor, scaled, hit)
        return self._cast(like, made, self._node.meta["val"].dtype)

    def _cast(self, like: Node, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self._call(like, aten._to_copy.default, node, dtype=dtype)

    def _classes(self, like: Node, row: Node) -> Node:
        value = row.meta["val"]
        made = self._graph.call_function(
            aten.arange.default,
            (int(value.shape[1]),),
            {"dtype": torch.int64, "device": value.device, "pin_memory": False},
        )
        with value.fake_mode:
            val = torch.arange(value.shape[1], device=value.device)
        made.meta.update(val=val, tag=like.meta["tag"])
        return made

    def _widen(self) -> int | None:
        """Take the softmax over whole padded rows, in which what is no class counts nothing; gives
        their width, None if they are not padded."""
        path: list[Node] = []
        node: Any = self._log_softmax.args[0]
        while node.target in _PASSED and _keeps_rows(node):
            path.append(node)
            node = node.args[0]
        if node.target is not aten.slice.Tensor or node.args[1:] != (1, 0, self._count):
            return None
        whole: Any = node.args[0]
        width = int(whole.meta["val"].shape[1])
        like = self._log_softmax
        with self._graph.inserting_before(like):
            for passed in reversed(path):
                whole = self._again(passed, whole, width)
            is_class = self._call(like, aten.lt.Scalar, self._classes(like, whole), self._count)
            whole = self._call(like, aten.where.ScalarOther, is_class, whole, -math.inf)
            made = self._call(like, like.target, whole, *like.args[1:])
        self._widen_readers(like, made)
        self._log_softmax = made
        return width

    def _widen_readers(self, narrow: Node, whole: Node) -> None:
        """Give whole rows to what can take them, else a part of them."""
        casts = [user for user in narrow.users if _is_cast_of_loss(user)]
        for cast in casts:
            with self._graph.inserting_after(whole):
                made = self._call(cast, cast.target, whole, **cast.kwargs)
            cast.replace_all_uses_with(made)
            self._graph.erase_node(cast)
        with self._graph.inserting_after(whole):
            part = self._call(whole, aten.slice.Tensor, whole, 1, 0, self._count)
        narrow.replace_all_uses_with(part, lambda user: user.target not in _TAKE_WHOLE_ROWS)
        narrow.replace_all_uses_with(whole)
        self._graph.erase_node(narrow)

    def _replace_pads(self, gradient: Node, width: int) -> None:
        """What pads the gradient, after casts and views, takes the whole rows instead."""
        todo: list[tuple[Node, Callable[[], Node]]] = [(self._node, lambda: gradient)]
        while todo:
            node, make = todo.pop()
            for user in list(node.users):
                is_pad = user.target is aten.constant_pad_nd.default
                if is_pad and _pads_columns(user, width):
                    with self._graph.inserting_before(user):
                        user.replace_all_uses_with(make())
                    self._graph.erase_node(user)
                elif user.target in _PASSED and _keeps_rows(user):
                    todo.append((user, self._remade(user, make, width)))

    def _remade(self, node: Node, make: Callable[[], Node], width: int) -> Callable[[], Node]:
        return lambda: self._again(node, make(), width)

    def _again(self, node: Node, whole: Node, width: int) -> Node:
        """A cast or view of whole rows."""
        args = node.args[1:]
        if node.target is not aten._to_copy.default:
            shape: Any = node.args[1]
            args = ([*shape[:-1], width],)
        return self._call(node, node.target, whole, *args, **node.kwargs)

    def _call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        return new_call(self._graph, like.meta["tag"], target, *args, **kwargs)


_TAKE_WHOLE_ROWS = (
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten._log_softmax_backward_data.default,
)


def _is_cast_of_loss(node: Node) -> bool:
    is_cast = node.target is aten._to_copy.default
    return is_cast and all(user.target in _TAKE_WHOLE_ROWS for user in node.users)


def _keeps_rows(node: Node) -> bool:
    """Whether a cast or view leaves the last dimension as it is."""
    base: Any = node.args[0]
    return bool(base.meta["val"].shape[-1] == node.meta["val"].shape[-1])


def _pads_columns(node: Node, width: int) -> bool:
    """Whether a pad makes rows just as wide, with zeros behind, and nothing else."""
    pads: Any = node.args[1]
    value = node.args[2] if len(node.args) > 2 else 0
    is_columns = pads[0] == 0 and not any(pads[2:])
    return bool(is_columns and value == 0 and node.meta["val"].shape[-1] == width)
