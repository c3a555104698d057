"""Turn in-place ops into functional ones.

Where plainly right the graph is rewritten, `x.op_()` into `op(x)`. Other writes, and the views of
what they write, are traced again through `torch.func.functionalize`: those nodes alone, as a trace
costs about a millisecond for each.
"""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from devplace.step_capture.analysis import NO_OPS, mutates, storages, view_bases, written_by
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

_RENAMED = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.zero_.default: aten.zeros_like.default,
    aten.fill_.Scalar: aten.full_like.default,
}
# Functional ops whose result has the dtype of the first argument.
_LIKE_WRITTEN = {aten.bernoulli.p, aten.zeros_like.default, aten.full_like.default}


def make_functional(gm: torch.fx.GraphModule, tagger: Tagger) -> None:
    """Rid a graph of mutating ops, in place; written inputs become changed outputs."""
    for node in reversed(gm.graph.nodes):
        if node.target is aten._local_scalar_dense.default and not node.users:
            gm.graph.erase_node(node)  # a value that was known without it
    written = _rewrite(gm)
    if written:
        _Writes(gm, written).replace(tagger)


def _functional_variant(node: Node) -> Any:
    """The functional overload of an in-place op, or None."""
    target: Any = node.target
    if target in _RENAMED:
        return _RENAMED[target]
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
    return other


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


def _rewrite(gm: torch.fx.GraphModule) -> set[int]:
    """Rewrite plain mutations in place of the graph; gives storages that have others."""
    nodes = list(gm.graph.nodes)
    mutations = [n for n in nodes if mutates(n)]
    if not mutations:
        return set()
    aliases = _Aliases(nodes)
    planned: dict[Node, Any] = {}
    left: set[int] = set()
    for node in mutations:
        target = _functional_variant(node)
        if target is not None and _is_plain(node, aliases):
            planned[node] = target
        else:
            for each in (node, *written_by(node.target, node.args, node.kwargs)):
                left |= storages(each)
    planned = {node: target for node, target in planned.items() if not storages(node) & left}
    _apply(gm, nodes, planned, aliases.root)
    return left


def _is_plain(node: Node, aliases: _Aliases) -> bool:
    """Whether a mutation writes all of its first argument, and no other tensor sees that."""
    written = node.args[0] if node.args else None
    if not isinstance(written, torch.fx.Node) or aliases.root[node] is not aliases.root[written]:
        return False
    is_alike = written.meta["val"].dtype == node.meta["val"].dtype
    return bool(is_alike) and aliases.is_sole(node, written)


def _apply(
    gm: torch.fx.GraphModule,
    nodes: list[Node],
    planned: dict[Node, Any],
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
        target = planned[node]
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


# Writes whose functional forms give contiguous results, whatever the layout of what is written:
# what else is a view of it would then not fit.
_LOSE_LAYOUT = {
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.masked_scatter_.default: aten.masked_scatter.default,
}


class _Writes:
    """Writes of a graph that are not plain, with views of what they write.

    Args:
        gm: The graph.
        written: Storages that they write.

    Attributes:
        inside: The writes and views. They are traced again, in their order.
        reads: Each other node that reads one of them, or what they write -> what it reads.
        given: What they and `reads` get from elsewhere.
    """

    def __init__(self, gm: torch.fx.GraphModule, written: set[int]) -> None:
        self._gm = gm
        self._nodes = list(gm.graph.nodes)
        touching = {n for n in self._nodes if storages(n) & written}
        self.inside: set[Node] = set()
        for node in self._nodes:
            if node in touching and (mutates(node) or self._is_view(node)):
                self.inside.add(node)
        self._find_reads(touching)
        owners = [storages(node) & written for node in self.given]
        if sum(map(len, owners)) > len(set().union(*owners)):  # it takes them for different memory
            self.inside = {n for n in self._nodes if n.op == "call_function"}
            self._find_reads(set(self._nodes))

    def _is_view(self, node: Node) -> bool:
        bases = view_bases(node)
        return bool(bases) and (node.target is not operator.getitem or bases[0] in self.inside)

    def _find_reads(self, touching: set[Node]) -> None:
        self.reads: dict[Node, list[Node]] = {}
        self.given: dict[Node, None] = {}
        for node in self._nodes:
            known = node.all_input_nodes
            if node not in self.inside:
                known = [each for each in known if each in touching and _is_tensor(each)]
                self.reads[node] = known
            self.given |= dict.fromkeys(each for each in known if each not in self.inside)

    def replace(self, tagger: Tagger) -> None:
        """Put functional ops in their place."""
        origins: dict[Node, Node] = {}
        run = functionalize(lambda *values: self._run(values, tagger, origins), remove="mutations")
        with torch.no_grad():
            given = [_fake(node, self._gm) for node in self.given]
            trace = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
            made = trace(*given)
        tagger.fixed = None
        self._splice(made, origins)

    def _run(
        self, values: tuple[Any, ...], tagger: Tagger, origins: dict[Node, Node]
    ) -> list[torch.Tensor]:
        """Run what is inside; gives what each other node reads, as it is then.

        Args:
            values: Of what is given.
            tagger: Gives nodes that are traced the tag of that for which they are.
            origins: Gets those nodes -> that for which they are.
        """
        mode = get_proxy_mode()
        graph: Any = None if mode is None else mode.tracer.graph
        if mode is not None:
            tagger.install(mode.tracer)
        now = dict(zip(self.given, values, strict=True))
        found: list[torch.Tensor] = []
        for node in self._nodes:
            # Before torch 2.13 a reversed list of nodes is no iterator.
            last = None if graph is None else next(iter(reversed(graph.nodes)))
            tagger.fixed = node.meta.get("tag")
            if node in self.inside:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), now.__getitem__)
                loses = _LOSE_LAYOUT.get(node.target)
                if loses is None:
                    now[node] = node.target(*args, **kwargs)
                else:
                    now[node] = aten.copy_.default(args[0], loses(*args, **kwargs))
            else:  # a copy keeps what is there now
                found += [aten.clone.default(now[each]) for each in self.reads[node]]
            for made in () if graph is None else reversed(graph.nodes):
                if made is last:
                    break
                origins[made] = node
        return found

    def _splice(self, made: torch.fx.GraphModule, origins: dict[Node, Node]) -> None:
        """Take over what was traced, each node where its origin is."""
        graph = self._gm.graph
        places = (node for node in made.graph.nodes if node.op == "placeholder")
        copies: dict[Node, Node] = dict(zip(places, self.given, strict=True))
        for node in made.graph.nodes:
            if node.op not in ("call_function", "get_attr") or node not in origins:
                continue  # what is after the last origin writes inputs, which outputs are for
            if node.op == "get_attr":
                name = f"{node.target}_of_writes"
                setattr(self._gm, name, getattr(made, node.target))
                node.target = name
            with graph.inserting_before(origins[node]):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        (output,) = made.graph.find_nodes(op="output")
        kept = iter(output.args[0])
        for node, known in self.reads.items():
            for each in known:
                node.replace_input_with(each, copies[next(kept).args[0]])
        for node in reversed(self._nodes):
            if node in self.inside:
                graph.erase_node(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"


def _fake(node: Node, gm: torch.fx.GraphModule) -> Any:
    """The value of a node without its values."""
    return node.meta["val"].detach() if "val" in node.meta else getattr(gm, str(node.target))
