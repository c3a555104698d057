"""Turn in-place ops into functional ones.

Where plainly right the graph is rewritten, `x.op_()` into `op(x)`; otherwise the whole graph is
traced again through `torch.func.functionalize`, which costs about as much as the capture itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from devplace.step_capture.analysis import NO_OPS, mutates, storages
from devplace.step_capture.tags import Tagger

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten
_SPLITS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unbind.int,
}

# Functional ops whose result has the dtype of the first argument.
_LIKE_WRITTEN = {aten.bernoulli.p, aten.zeros_like.default, aten.full_like.default}


def make_functional(
    gm: torch.fx.GraphModule, flat: list[torch.Tensor], tagger: Tagger
) -> torch.fx.GraphModule:
    """The graph without mutating ops; written inputs become changed outputs."""
    for node in reversed(gm.graph.nodes):
        if node.target is aten._local_scalar_dense.default and not node.users:
            gm.graph.erase_node(node)  # a value that was known without it
    if _rewrite(gm):
        return gm
    with torch.no_grad():
        again = make_fx(
            functionalize(_replay(gm, tagger), remove="mutations"),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*[f.detach() for f in flat])
    _copies_to_outputs(again, gm)
    return again


def _functional_variant(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The functional overload of an in-place op with its arguments, or None."""
    target: Any = node.target
    if target is aten.bernoulli_.float:
        return aten.bernoulli.p, (*node.args, 0.5)[:2]
    if target is aten.zero_.default:
        return aten.zeros_like.default, node.args
    if target is aten.fill_.Scalar:
        return aten.full_like.default, node.args
    namespace, name = target._schema.name.split("::")
    if namespace != "aten" or not name.endswith("_") or not hasattr(aten, name[:-1]):
        return None
    packet, mine = getattr(aten, name[:-1]), target._schema.arguments
    overloads = [
        getattr(packet, each) for each in packet.overloads()
    ]  # pow_.Scalar has another name
    other = next((each for each in overloads if _takes_alike(each._schema, mine)), None)
    if other is None or other._schema.is_mutable or len(other._schema.returns) != 1:
        return None
    written = [a for a in mine if a.alias_info is not None and a.alias_info.is_write]
    if len(written) != 1 or written[0].name != mine[0].name:
        return None
    return other, node.args


def _takes_alike(schema: Any, arguments: Any) -> bool:
    theirs, mine = (
        [(a.name, str(a.type), a.default_value) for a in each]
        for each in (schema.arguments, arguments)
    )
    return theirs == mine


def _disjoint(one: Node, other: Node) -> bool:
    """Different outputs of one split: their memory does not overlap."""
    if one.target is not operator.getitem or other.target is not operator.getitem:
        return False
    base: Any = one.args[0]
    return base is other.args[0] and base.target in _SPLITS and one.args[1] != other.args[1]


class _Aliases:
    """Which nodes are the same tensor, share memory, and until when they are used."""

    def __init__(self, nodes: list[Node]) -> None:
        self.order = {n: i for i, n in enumerate(nodes)}
        self.last_use = {n: max((self.order[u] for u in n.users), default=-1) for n in nodes}
        self.root: dict[Node, Node] = {}
        self.by_storage: dict[int, list[Node]] = {}
        for node in nodes:
            self.root[node] = self._root(node)
            for storage in storages(node):
                self.by_storage.setdefault(storage, []).append(node)

    def _root(self, node: Node) -> Node:
        if node.op != "call_function" or not (node.target in NO_OPS or mutates(node)):
            return node
        base = node.args[0] if node.args else None
        if not isinstance(base, torch.fx.Node) or base.meta["val"].shape != node.meta["val"].shape:
            return node
        return self.root[base] if node.target is not aten.lift_fresh_copy.default else node

    def is_sole(self, node: Node, written: Node) -> bool:
        """Whether no other live tensor shares memory with what `node` writes."""
        order, root = self.order, self.root
        for storage in storages(written):
            for other in self.by_storage[storage]:
                if root[other] is root[written] or order[other] > order[node]:
                    continue  # the same tensor, or derived later through an alias judged here
                dead = self.last_use[other] <= order[node] and other.op != "placeholder"
                if not dead and not _disjoint(root[written], root[other]):
                    return False
        return True


def _rewrite(gm: torch.fx.GraphModule) -> bool:
    """Rewrite in place of the graph; False, and nothing changed, if a mutation is not plain."""
    nodes = list(gm.graph.nodes)
    mutations = [n for n in nodes if mutates(n)]
    if not mutations:
        return True
    aliases = _Aliases(nodes)
    planned: dict[Node, tuple[Any, tuple[Any, ...]]] = {}
    for node in mutations:
        variant = _functional_variant(node)
        written = node.args[0] if node.args else None
        if variant is None or not isinstance(written, torch.fx.Node):
            return False
        same = aliases.root[node] is aliases.root[written]
        if not same or written.meta["val"].dtype != node.meta["val"].dtype:
            return False
        if not aliases.is_sole(node, written):
            return False
        planned[node] = variant
    _apply(gm, nodes, planned, aliases.root)
    return True


def _apply(
    gm: torch.fx.GraphModule,
    nodes: list[Node],
    planned: dict[Node, tuple[Any, tuple[Any, ...]]],
    root: dict[Node, Node],
) -> None:
    newest: dict[Node, Node] = {}

    def current(node: Node) -> Node:
        return newest.get(root.get(node, node), node)

    for node in nodes:
        if node.op == "placeholder":
            continue
        if newest:
            node.args = torch.fx.node.map_arg(node.args, current)
            node.kwargs = torch.fx.node.map_arg(node.kwargs, current)
        if node not in planned:
            continue
        target = planned[node][0]
        keep = 1 if target is aten.zeros_like.default else len(node.args)
        args = node.args[:keep] if target is not aten.bernoulli.p else (*node.args, 0.5)[:2]
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(target, args, _supported_kwargs(node, target))
        made.meta.update(node.meta)
        made = _as_written(gm, made, node)
        newest[root[node]] = made
        root[made] = root[node]
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)


def _as_written(gm: torch.fx.GraphModule, made: Node, node: Node) -> Node:
    """What the functional op made in the dtype of what the in-place op `node` wrote to.

    `x.add_(y)` keeps the dtype of `x`; `x + y` has that of both, and `x > y` is bool.
    """
    if made.target in _LIKE_WRITTEN:
        return made
    args, kwargs = torch.fx.node.map_arg((made.args, made.kwargs), lambda n: n.meta["val"])
    value, dtype = made.target(*args, **kwargs), node.meta["val"].dtype
    if value.dtype == dtype:
        return made
    made.meta["val"] = value
    with gm.graph.inserting_before(node):
        cast = gm.graph.call_function(aten._to_copy.default, (made,), {"dtype": dtype})
    cast.meta.update(node.meta)
    return cast


def _supported_kwargs(node: Node, target: Any) -> dict[str, Any]:
    known = {a.name for a in target._schema.arguments}
    return {k: v for k, v in node.kwargs.items() if k in known}


class _TaggedInterpreter(torch.fx.Interpreter):  # type: ignore[misc]
    """Runs a graph so that nodes traced meanwhile get the tag of the node being run."""

    def __init__(self, gm: torch.fx.GraphModule, tagger: Tagger) -> None:
        super().__init__(gm)
        self._tagger = tagger

    def run_node(self, n: Node) -> Any:
        self._tagger.fixed = n.meta.get("tag")
        return super().run_node(n)


def _replay(gm: torch.fx.GraphModule, tagger: Tagger) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        mode = get_proxy_mode()
        if mode is not None:
            tagger.install(mode.tracer)
        try:
            return _TaggedInterpreter(gm, tagger).run(*args)
        finally:
            tagger.fixed = None

    return run


def _copies_to_outputs(gm: torch.fx.GraphModule, before: torch.fx.GraphModule) -> None:
    """Turn the closing `copy_` into placeholders, which functionalize adds, into outputs."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    results = list(output.args[0])
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not aten.copy_.default:
            continue
        base, value = node.args[0], node.args[1]
        if base.op == "placeholder":
            results = [value if r is node or r is base else r for r in results]
            output.args = (results,)
            gm.graph.erase_node(node)
