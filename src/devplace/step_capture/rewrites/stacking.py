"""One product for the gradient of a weight that is used many times, as in unrolled recurrent nets.

Autograd makes a product for every use and adds them up. One product of all rows, stacked, is what
cuDNN does for its own recurrent layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch

from devplace.step_capture.layouts import new_call
from devplace.step_capture.tags import Tag

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten

_WRAPPERS = (aten.t.default, aten.view.default, aten._unsafe_view.default, aten._to_copy.default)


class _Wrapper(NamedTuple):
    """A call that gives its first argument's values another shape or dtype."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


class _Term(NamedTuple):
    """`t(rows) @ other`, or the sum of `rows` over dim 0 (then `other` is None), wrapped.

    Attributes:
        rows: Gradient of an output, `[rows, outputs]`.
        other: What the weight was multiplied by, `[rows, inputs]`.
        call: The product or sum.
        wrappers: What follows it, in order.
    """

    rows: Node
    other: Node | None
    call: Node
    wrappers: tuple[_Wrapper, ...]


def stack_gradients(graph: torch.fx.Graph) -> None:
    """Compute sums of products, and of sums over rows, by one call for each micro-batch.

    Terms are stacked if copying their rows moves less than adding up their results. Sums over rows
    are stacked where the rows are stacked anyway. What is no longer used stays in the graph.
    """
    stacks: dict[tuple[Node, ...], Node] = {}
    others = [root for root in _sums(graph) if not _stack(graph, root, stacks, products=True)]
    for root in others:
        _stack(graph, root, stacks, products=False)


def num_spared_products(graph: torch.fx.Graph) -> int:
    """How many products `stack_gradients` would make fewer."""
    groups = [terms for root in _sums(graph) for terms in _terms(root, products=True)[0]]
    return sum(len(terms) - 1 for terms in groups if len(terms) > 1 and _pays(terms))


def _sums(graph: torch.fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if _is_sum(node) and not _is_inner(node)]


def _is_sum(node: Node) -> bool:
    """Whether a node adds up two gradients."""
    if node.target is not aten.add.Tensor or node.kwargs or node.meta["tag"].stage != "backward":
        return False
    return len(node.args) == 2 and all(isinstance(arg, torch.fx.Node) for arg in node.args)


def _is_inner(node: Node) -> bool:
    """Whether a sum is only a part of another one."""
    return _is_sum(node) and len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _leaves(root: Node) -> Iterator[Node]:
    """What a sum adds up, in order."""
    todo = list(reversed(root.args))
    while todo:
        node = todo.pop()
        if isinstance(node, torch.fx.Node) and _is_inner(node):
            todo += reversed(node.args)
        else:
            yield node


def _stack(
    graph: torch.fx.Graph, root: Node, stacks: dict[tuple[Node, ...], Node], products: bool
) -> bool:
    """Stack what can be of the terms of a sum; tells whether any were.

    Each call is made, and added, as soon as what it reads is there, so that a micro-batch's rows
    are not kept until the last one has gone back.
    """
    groups, rest = _terms(root, products)
    made: list[Node] = []
    for terms in groups:
        terms.sort(key=lambda term: term.rows)  # in the order of the graph
        rows = tuple(term.rows for term in terms)
        if len(terms) > 1 and (_pays(terms) if products else rows in stacks):
            made.append(_one_call(graph, terms, stacks))
        else:
            rest += [_wrapped(term) for term in terms]
    if not made:
        return False
    total, *others = sorted(made + rest)
    for other in others:
        with after(graph, total, other):
            total = new_call(graph, root.meta["tag"], root.target, total, other)
    root.replace_all_uses_with(total)
    return True


def _terms(root: Node, products: bool) -> tuple[list[list[_Term]], list[Node]]:
    """What a sum adds up: terms that can be stacked with each other, and the other leaves."""
    rest: list[Node] = []
    groups: dict[Any, list[_Term]] = defaultdict(list)
    for leaf in _leaves(root):
        term = _term(leaf, products)
        if term is None:
            rest.append(leaf)
        else:
            groups[_kind(term)].append(term)
    return list(groups.values()), rest


def _wrapped(term: _Term) -> Node:
    """The leaf that a term was found in."""
    node = term.call
    for _ in term.wrappers:
        node = next(iter(node.users))
    return node


def _term(leaf: Node, products: bool) -> _Term | None:
    """What a leaf of a sum computes, if that can be stacked and nothing else reads it."""
    wrappers: list[_Wrapper] = []
    node = leaf
    while len(node.users) == 1 and node.target in _WRAPPERS:
        kwargs = tuple(sorted(node.kwargs.items()))
        wrappers.append(_Wrapper(node.target, _frozen(node.args[1:]), kwargs))
        node = node.args[0]
    if len(node.users) != 1 or node.meta["tag"].stage != "backward":
        return None
    after = tuple(reversed(wrappers))
    if products and node.target is aten.mm.default:
        turned, other = node.args
        if turned.target is aten.t.default:
            return _Term(turned.args[0], other, node, after)
    is_over_rows = node.target is aten.sum.dim_IntList and list(node.args[1]) == [0]
    if not products and is_over_rows and node.args[0].meta["val"].dim() == 2:
        return _Term(node.args[0], None, node, after)
    return None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _kind(term: _Term) -> Any:
    """Terms that can be stacked have the same."""
    parts = [term.rows] if term.other is None else [term.rows, term.other]
    shapes = tuple((part.meta["val"].shape[1], part.meta["val"].dtype) for part in parts)
    rest = (_frozen(term.call.args[2:]), tuple(sorted(term.call.kwargs.items())))
    return term.call.meta["tag"].micro_batch, shapes, term.wrappers, rest


def _pays(terms: Sequence[_Term]) -> bool:
    """Whether stacked rows have fewer elements than the results that would be added up."""
    copied = sum(
        part.meta["val"].numel() for term in terms for part in (term.rows, term.other) if part
    )
    added = (len(terms) - 1) * int(terms[0].call.meta["val"].numel())
    return bool(copied < added)


def _one_call(
    graph: torch.fx.Graph,
    terms: Sequence[_Term],
    stacks: dict[tuple[Node, ...], Node],
) -> Node:
    """All terms by one product or sum, wrapped as they were."""
    tag: Tag = min((term.call.meta["tag"] for term in terms), key=lambda tag: tag.call)
    call, wrappers = terms[0].call, terms[0].wrappers

    def stacked(parts: list[Node]) -> Node:
        """The rows of all parts, one below the other: made once, when the last is there."""
        key = tuple(parts)
        if key not in stacks:
            with after(graph, *parts):
                stacks[key] = new_call(graph, tag, aten.cat.default, parts)
        return stacks[key]

    rows = stacked([term.rows for term in terms])
    reads = [rows]
    if terms[0].other is not None:
        reads.append(stacked([term.other for term in terms if term.other is not None]))
    with after(graph, *reads):
        args: tuple[Any, ...] = (rows, *call.args[1:])
        if terms[0].other is not None:
            args = (new_call(graph, tag, aten.t.default, rows), reads[1])
        node = new_call(graph, tag, call.target, *args, **call.kwargs)
        for wrapper in wrappers:
            node = new_call(graph, tag, wrapper.target, node, *wrapper.args, **dict(wrapper.kwargs))
    return node


def after(graph: torch.fx.Graph, *nodes: Node) -> AbstractContextManager[Any]:
    """Within, calls are made in turn right after the last of these nodes."""
    last = max(nodes)
    if last.op == "placeholder":  # placeholders come before all else
        last = max(node for node in graph.nodes if node.op == "placeholder")
    point: AbstractContextManager[Any] = graph.inserting_before(last.next)
    return point
