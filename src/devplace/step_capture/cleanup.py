"""Simplify the traced graph and remove hidden writes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from devplace.errors import CaptureError
from devplace.step_capture.analysis import NO_OPS, SILENT_MUTATORS, is_random, mutates
from devplace.step_capture.request import Input

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten


def clean(graph: torch.fx.Graph) -> None:
    """Drop no-ops, make batch norm explicit, merge equal nodes, remove dead ones."""
    _drop_no_ops(graph)
    _explicit_batch_norm(graph)
    _simplify_dropout(graph)
    _join_counters(graph)
    _merge_equal(graph)
    remove_dead(graph)


def drop_last_results(graph: torch.fx.Graph, count: int) -> None:
    """Drop the last results of a clean graph, and what only they need."""
    (output,) = graph.find_nodes(op="output")
    given: Any = output.args[0]
    output.args = (given[: len(given) - count],)
    remove_dead(graph)


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default)


def _drop_no_ops(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        same = _same_value(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _same_value(node: Node) -> Node | None:
    """The node that has the same value, if this one only passes it on."""
    base = node.args[0]
    if node.target in NO_OPS:
        return base
    if node.target in _RESHAPES and base.meta["val"].shape == node.meta["val"].shape:
        return base
    if node.target is aten.t.default and base.target is aten.t.default:
        return base.args[0]
    return None


def _explicit_batch_norm(graph: torch.fx.Graph) -> None:
    """native_batch_norm writes its running statistics unsaid; use the form that returns them.

    A second use of the same statistics reads what the first one returned.
    """
    newest: dict[Node, Node] = {}

    def current(node: Node) -> Node:
        return newest.get(node, node)

    for node in list(graph.nodes):
        if newest and node.op != "placeholder":
            node.args = torch.fx.node.map_arg(node.args, current)
            node.kwargs = torch.fx.node.map_arg(node.kwargs, current)
        if node.op == "call_function" and node.target in SILENT_MUTATORS:
            args = [*node.args, *[None] * (8 - len(node.args))]
            if args[5] and args[3] is not None:
                _replace_batch_norm(graph, node, args, newest)
    for node in graph.nodes:
        # In training the backward does not read the running statistics.
        if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _replace_batch_norm(
    graph: torch.fx.Graph, node: Node, args: list[Any], newest: dict[Node, Node]
) -> None:
    if node.target is not aten.native_batch_norm.default:
        raise CaptureError(f"Batch norm kernel {node.target} is not supported in training.")
    x, weight, bias, mean, var, _, momentum, eps = args
    with graph.inserting_after(node):
        made = graph.call_function(
            aten._native_batch_norm_legit_functional.default,
            (x, weight, bias, mean, var, True, momentum, eps),
        )
    made.meta.update(node.meta)
    made.meta["val"] = (*node.meta["val"], mean.meta["val"], var.meta["val"])
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    after = made
    for index, old in ((3, mean), (4, var)):
        with graph.inserting_after(after):
            new = graph.call_function(operator.getitem, (made, index))
        new.meta.update(tag=made.meta["tag"], val=old.meta["val"])
        first = next((k for k, v in newest.items() if v is old), old)
        newest[first] = new
        after = new


def _simplify_dropout(graph: torch.fx.Graph) -> None:
    """`bernoulli(empty_like(x), p)` reads only the shape: take x itself, one op less."""
    for node in graph.nodes:
        if node.target is not aten.bernoulli.p:
            continue
        template: Any = node.args[0]
        if template.target is aten.empty_like.default:
            source = template.args[0]
            if source.meta["val"].dtype == node.meta["val"].dtype:
                node.args = (source, *node.args[1:])


def _join_counters(graph: torch.fx.Graph) -> None:
    """`(n + 1) + 1` is `n + 2` for integers: batch norm counts every micro-batch."""
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        inner, count = node.args
        if type(count) is not int or node.meta["val"].is_floating_point():
            continue
        is_counter = isinstance(inner, torch.fx.Node) and inner.target is aten.add.Tensor
        if is_counter and not inner.kwargs and len(inner.users) == 1 and type(inner.args[1]) is int:
            node.args = (inner.args[0], inner.args[1] + count)


def _key(value: Any) -> Any:
    """Hashable form of an argument in which 1, 1.0 and True differ."""
    if isinstance(value, torch.fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    return type(value), repr(value)


def _merge_equal(graph: torch.fx.Graph) -> None:
    """Merge equal pure nodes of one stage and micro-batch."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or mutates(node) or is_random(node):
            continue
        tag = node.meta["tag"]
        kwargs = tuple((k, _key(v)) for k, v in node.kwargs.items())
        key = (node.target, tag.stage, tag.micro_batch, _key(node.args), kwargs)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def cast_weights_once(graph: torch.fx.Graph, inputs: Sequence[Input]) -> None:
    """Let all micro-batches read one cast of a parameter, instead of one each.

    It belongs to no micro-batch: the device of the parameter casts it and sends what is smaller.

    Args:
        graph: A clean graph.
        inputs: What its placeholders are.
    """
    placeholders = graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, inputs, strict=True)
    parameters = {node for node, entry in pairs if entry.kind == "parameter"}
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        base = node.args[0] if node.op == "call_function" and node.args else None
        if node.target is not aten._to_copy.default or base not in parameters:
            continue
        tag = node.meta["tag"]
        kwargs = tuple((k, _key(v)) for k, v in node.kwargs.items())
        first = seen.setdefault((tag.stage, base, kwargs), node)
        if first is not node:
            first.meta["tag"] = first.meta["tag"]._replace(micro_batch=-1)
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def remove_dead(graph: torch.fx.Graph) -> None:
    """Remove unused nodes; random ones stay, so that later draws are those of eager."""
    for node in reversed(list(graph.nodes)):
        removable = node.op == "get_attr" or (
            node.op == "call_function" and not mutates(node) and not is_random(node)
        )
        if removable and not node.users:
            graph.erase_node(node)
