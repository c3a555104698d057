"""Classify nodes of a traced graph: views, random draws, mutations, fusible ops."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
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
# Fusible beside what torch tags as pointwise. What writes places that were read (scatter,
# index_put, embedding_dense_backward) adds in any order on a GPU, so its kernels stay torch's.
_FUSIBLE = _NO_ARITHMETIC | frozenset([
    "sum", "mean", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "any", "all",
    "prod", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp",
    "_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm", "native_group_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "native_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional",
    "native_batch_norm_backward", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
    "nll_loss2d_backward", "mse_loss", "mse_loss_backward", "smooth_l1_loss",
    "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "soft_margin_loss",
    "soft_margin_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits", "gelu", "gelu_backward", "silu", "silu_backward",
    "sigmoid", "sigmoid_backward", "tanh", "tanh_backward", "threshold", "threshold_backward",
    "hardtanh", "hardtanh_backward", "leaky_relu", "leaky_relu_backward", "elu", "elu_backward",
    "glu", "glu_backward", "mish_backward", "softplus_backward", "log_sigmoid_forward",
    "log_sigmoid_backward", "hardswish", "hardswish_backward", "hardsigmoid",
    "hardsigmoid_backward", "_prelu_kernel", "_prelu_kernel_backward", "rsub", "fill",
    "native_dropout", "convert_element_type",
])
_PAY_ALONE = frozenset([
    "sum", "cat", "constant_pad_nd", "native_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "native_batch_norm_backward",
])
# Of two dimensions. Compilers write loops over windows of this size at most.
_POOLS = frozenset([
    "avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
])
_MAX_WINDOW = 25
_LARGE_BYTES = 2**16  # smaller tensors take as long as starting a kernel does
_MISTAKABLE = frozenset([torch.bool, torch.uint8])  # an index of these is a mask
# fmt: on


def pays_alone(node: torch.fx.Node) -> bool:
    """Whether a fusible op is worth a compiled kernel of its own: it turns dimensions around, joins
    tensors, adds up, broadcasts a smaller tensor over a large one (as an update does with the
    learning rate: a quarter of an H200's bandwidth by PyTorch's kernel), or is a batch norm, which
    PyTorch computes in several passes, or a pool (averages of Inception-V3 with channels last take
    3.9 ms by PyTorch's kernels, of 24.8)."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None:
        return False
    if packet.__name__ in _PAY_ALONE | _POOLS:
        return True
    made = node.meta["val"]
    if not isinstance(made, torch.Tensor):
        return False
    given = [n.meta["val"] for n in node.all_input_nodes]
    if packet.__name__ in ("clone", "_to_copy"):
        return any(each.stride() != made.stride() for each in given)
    is_large = made.numel() * made.element_size() >= _LARGE_BYTES
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_large and is_pointwise and any(each.numel() < made.numel() for each in given)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors of a node's value."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def op_name(node: torch.fx.Node) -> str:
    """Name of a node's op without its overload, such as `mm`; empty for other functions."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


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
    return draws(node.target, node.args, node.kwargs)


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op so called draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "train"):
            given = args[index] if index < len(args) else argument.default_value
            given = kwargs.get(argument.name, given)
            if given is False or (argument.name == "dropout_p" and given == 0):
                return False
    return True


_WRITTEN: dict[Any, tuple[tuple[int, str], ...]] = {}


def written_by(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments of an op so called that it writes, said by its schema or not; lists are opened."""
    positions = _WRITTEN.get(target)
    if positions is None:
        schema = getattr(target, "_schema", None)
        arguments = enumerate(schema.arguments if schema is not None else ())
        positions = tuple(
            (k, a.name)
            for k, a in arguments
            if (a.alias_info is not None and a.alias_info.is_write)
            or (target in SILENT_MUTATORS and a.name.startswith("running_"))
        )
        _WRITTEN[target] = positions
    if not positions or (target in SILENT_MUTATORS and not args[5]):
        return []
    given = [args[k] if k < len(args) else kwargs.get(name) for k, name in positions]
    return [leaf for leaf in pytree.tree_leaves(given) if leaf is not None]


def view_bases(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Input nodes whose memory an output of the node shares; empty when it owns its memory."""
    if node.op != "call_function" or mutates(node):
        return []
    if node.target is operator.getitem or node.target in _HIDDEN_VIEWS:
        return [node.args[0]]
    return _schema_bases(node)


_ALIAS_ARGUMENTS: dict[Any, tuple[tuple[int, str], ...]] = {}


def shares_memory(target: Any) -> bool:
    """Whether a call of an op or function gives memory of its inputs."""
    return target in _HIDDEN_VIEWS or bool(_alias_arguments(target))


def _alias_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    positions = _ALIAS_ARGUMENTS.get(target)
    if positions is None:
        schema = getattr(target, "_schema", None)
        positions = ()
        if schema is not None and any(r.alias_info is not None for r in schema.returns):
            positions = tuple(
                (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None
            )
        _ALIAS_ARGUMENTS[target] = positions
    return positions


def _schema_bases(node: torch.fx.Node) -> list[torch.fx.Node]:
    bases = []
    for index, name in _alias_arguments(node.target):
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


def is_fusible(node: torch.fx.Node) -> bool:
    """Whether a compiler can make one kernel of this op and others like it.

    Fusible are ATen's and prims' ops that torch tags as pointwise, and by name reductions,
    softmaxes, norms, losses, gathers, copies, concatenations and creators (`_FUSIBLE`), on strided
    tensors of real numbers on one device, of shapes known at capture.

    So are pools of small windows, not dilated.

    Not fusible are all others: products, convolutions, attention, recurrent cells, sorts, scans,
    scatters; random ops; ops that write their inputs, said or unsaid; ops of other
    libraries. Nor are views and items of several outputs (see `view_bases`): they make nothing
    and belong to what they read.
    """
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    if node.op != "call_function" or packet is None or target.namespace not in ("aten", "prims"):
        return False
    tags = getattr(target, "tags", ())
    is_listed = packet.__name__ in _FUSIBLE or _is_small_pool(node)
    if torch.Tag.pointwise not in tags and not is_listed:
        return False
    if mutates(node) or is_random(node) or view_bases(node):
        return False
    if target in SILENT_MUTATORS and node.args[5] and node.args[3] is not None:
        return False
    indices = node.args[1] if packet.__name__ == "index" else ()
    if any(i is not None and i.meta["val"].dtype in _MISTAKABLE for i in indices):
        return False
    inputs = [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]
    return _are_plain(inputs, tensors_in(node.meta.get("val")))


def _is_small_pool(node: torch.fx.Node) -> bool:
    """Whether the node is a pool, or the gradient of one, whose windows a compiler unrolls."""
    target: Any = node.target
    if target.overloadpacket.__name__ not in _POOLS:
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    sizes, dilation = list(given["kernel_size"]), list(given.get("dilation", ()))
    window = math.prod(sizes) if len(sizes) == 2 else sizes[0] ** 2
    return window <= _MAX_WINDOW and all(each == 1 for each in dilation)


def _are_plain(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether there are outputs, and all are strided, real, of fixed shape and on one device."""
    both = [*inputs, *outputs]
    return (
        bool(outputs)
        and all(t.layout is torch.strided and not t.is_quantized for t in both)
        and not any(t.dtype.is_complex for t in both)
        and not any(isinstance(size, torch.SymInt) for t in outputs for size in t.shape)
        and len({t.device for t in both}) == 1
    )
