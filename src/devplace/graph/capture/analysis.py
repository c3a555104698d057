"""What a node of a traced graph is: a view, a random draw, a mutation; what it costs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _overloads(*names: str) -> frozenset[Any]:
    """The overloads that this torch has, by `packet.overload`."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload, None)
        if op is not None:
            found.append(op)
    return frozenset(found)


# Share memory with their input though the schema does not say so.
_HIDDEN_VIEWS = _overloads(
    "_unsafe_view.default",
    "unsafe_split.Tensor",
    "unsafe_split_with_sizes.default",
    "unsafe_chunk.default",
    "_reshape_alias.default",
)
# Write their running statistics though the schema does not say so.
SILENT_MUTATORS = _overloads(
    "native_batch_norm.default", "cudnn_batch_norm.default", "miopen_batch_norm.default"
)
NO_OPS = _overloads(
    "detach.default", "alias.default", "lift_fresh.default", "lift_fresh_copy.default"
)
# Read only the rows they pick.
_GATHERS = frozenset({"embedding", "index_select", "gather", "index", "_embedding_bag", "take"})
# fmt: off
_NO_ARITHMETIC = frozenset([
    "clone", "copy", "_to_copy", "cat", "stack", "embedding", "index_select", "gather", "index",
    "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full",
    "full_like", "arange", "scalar_tensor", "new_zeros", "new_empty", "new_ones", "new_full",
    "constant_pad_nd", "roll", "flip", "repeat", "slice_scatter", "select_scatter",
    "slice_backward", "select_backward", "masked_fill", "where", "triu", "tril",
])
# fmt: on


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors of a node's value."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def results(gm: torch.fx.GraphModule) -> tuple[torch.fx.Node, ...]:
    """The nodes that a graph gives."""
    output: Any = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return tuple(output.args[0])


def mutates(node: torch.fx.Node) -> bool:
    """Whether the schema says that the node writes one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws random numbers; attention and dropout with rate 0 do not."""
    target = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "train"):
            given = node.args[index] if index < len(node.args) else argument.default_value
            given = node.kwargs.get(argument.name, given)
            if given is False or (argument.name == "dropout_p" and given == 0):
                return False
    return True


def view_bases(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Input nodes whose memory an output of the node shares; empty when it owns its memory."""
    if node.op != "call_function" or mutates(node):
        return []
    if node.target is operator.getitem or node.target in _HIDDEN_VIEWS:
        return [node.args[0]]
    return _schema_bases(node)


_ALIAS_ARGUMENTS: dict[Any, tuple[tuple[int, str], ...]] = {}


def _schema_bases(node: torch.fx.Node) -> list[torch.fx.Node]:
    target = node.target
    positions = _ALIAS_ARGUMENTS.get(target)
    if positions is None:
        schema = getattr(target, "_schema", None)
        positions = ()
        if schema is not None and any(r.alias_info is not None for r in schema.returns):
            positions = tuple(
                (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None
            )
        _ALIAS_ARGUMENTS[target] = positions
    bases = []
    for index, name in positions:
        value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
        bases += [n for n in pytree.tree_leaves(value) if isinstance(n, torch.fx.Node)]
    return bases


def storages(node: torch.fx.Node) -> set[int]:
    """Identities of the storages behind a node's fake value."""
    return {t.untyped_storage()._cdata for t in tensors_in(node.meta.get("val"))}


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any) -> int:
    batch, heads, rows, width = query.shape
    return int(2 * batch * heads * rows * key.shape[2] * (width + value.shape[3]))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *rest: Any) -> int:
    return 5 * _attention_flops(query, key, value) // 2


# Missing in torch.utils.flop_counter (2.13).
_EXTRA_FLOPS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
}


def count_flops(node: torch.fx.Node) -> int:
    """Floating-point operations; one per element for ops without a formula."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return 0
    formula = flop_registry.get(packet) or flop_registry.get(target)
    name = packet.__name__

    def values(args: Any) -> Any:
        return torch.fx.node.map_arg(args, lambda n: n.meta["val"])

    if formula is not None:
        return int(formula(*values(node.args), **values(node.kwargs), out_val=node.meta["val"]))
    if name in _EXTRA_FLOPS:
        return int(_EXTRA_FLOPS[name](*values(node.args)))
    made = tensors_in(node.meta.get("val"))
    if name in _NO_ARITHMETIC or not made or not made[0].is_floating_point():
        return 0
    read = [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]
    return int(max(math.prod(t.shape) for t in [*made, *read]))


def reads_rows_only(node: torch.fx.Node) -> bool:
    """Whether the node reads only the picked rows of its first input."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and packet.__name__ in _GATHERS
