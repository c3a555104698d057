"""A functional graph computed node by node in double precision, random ops fixed.

It is there to compare two graphs that must compute the same: rounding is out of the way, and what
is drawn is the same for every row. So dropout keeps all, and batch norm, whose statistics are those
of what it is given, normalises by fixed ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree

from devplace.device_kinds import is_host
from devplace.step_capture.analysis import (
    count_flops,
    is_fusible,
    is_random,
    op_name,
    tensors_in,
    view_bases,
)
from devplace.step_capture.micro_batches.attention import attention

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten
MAX_FLOPS, MAX_HOST_FLOPS = 2e13, 1e11
"""Some seconds on a GPU without fast double precision, and on two cores of a server."""
FAST_DOUBLE = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
"""Compute capabilities of GPUs with fast double precision: P100, V100, A100, H100, B200."""
MAX_FLOPS_FAST = 2e14
"""Some seconds on those."""
MAX_BYTES = 1 << 32
"""Of a CPU's memory."""
MAX_MADE_UP_BYTES = 1 << 29
"""Of values for a model on the meta device, which takes no memory itself."""
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_DRAWN = 0.5
# What ops that are not fusible read integers for: as indices, as classes, or as plain numbers.
_FROM_THE_END = ("index", "index_put", "take")  # indices may be negative
_INDICES = ("embedding", "index_select", "gather", *_FROM_THE_END)
_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_PLAIN = ("cumsum", "cumprod", "cummax", "cummin", "sort", "topk", "searchsorted", "bucketize")
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")


class NotEvaluatedError(Exception):
    """A graph cannot be computed here; the text says why."""


class KernelError(NotEvaluatedError):
    """A kernel refuses what it is given."""


def evaluate(
    gm: torch.fx.GraphModule,
    value_of: Callable[[int], torch.Tensor],
    device: torch.device,
    keep: Mapping[Node, Any] | None = None,
) -> tuple[list[torch.Tensor], bool]:
    """Results of a graph, and whether every op was computed in double precision.

    Args:
        gm: Functional graph, its nodes with fake values in `meta["val"]`.
        value_of: Place of an input -> its value.
        device: Where to compute.
        keep: Nodes whose values are wanted; filled.

    Raises:
        KernelError: A kernel raised an error.
        NotEvaluatedError: An op cannot be run, or there is too little memory.
    """
    run = _Run(gm, device)
    inputs = (node for node in gm.graph.nodes if node.op == "placeholder")
    places = {node: place for place, node in enumerate(inputs)}
    waiting = {node: len(node.users) for node in gm.graph.nodes}
    values: dict[Node, Any] = {}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step's own kernels say them, when it runs
            for node in gm.graph.nodes:
                if node.op == "output":
                    return [values[each] for each in node.args[0]], run.is_exact
                if not node.users:
                    continue
                given = value_of(places[node]) if node in places else None
                values[node] = run.value(node, values, given)
                if keep is not None and node in keep:
                    keep[node] = values[node]  # type: ignore[index]
                for each in node.all_input_nodes:
                    waiting[each] -= 1
                    if waiting[each] == 0:
                        del values[each]
    except NotEvaluatedError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise NotEvaluatedError("there is too little memory") from error
    except Exception as error:  # whatever a kernel raises
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KernelError(f"{node.target} does not run: {text}") from error
    raise AssertionError("an FX graph ends with its output")


class _Run:
    """Computes single nodes."""

    def __init__(self, gm: torch.fx.GraphModule, device: torch.device) -> None:
        self._gm = gm
        self._device = device
        self.is_exact = True

    def value(self, node: Node, values: Mapping[Node, Any], given: torch.Tensor | None) -> Any:
        if node.op in ("placeholder", "get_attr"):
            found = given if given is not None else getattr(self._gm, str(node.target))
            return _wide(found.detach().to(self._device))
        args, kwargs = torch.fx.node.map_aggregate(
            (node.args, node.kwargs), lambda each: self._argument(each, values)
        )
        fixed = self._fixed(node, args)
        if fixed is None:
            fixed = attention(node, args, kwargs)
        if fixed is not None:
            return fixed
        args, kwargs = _without_dropout(node, args, dict(kwargs))
        target: Any = node.target
        if not is_host(self._device.type):
            check_indices(node, args)
        try:
            made = target(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            made = self._in_own_dtype(node, values)
        made = pytree.tree_map(_wide, made)
        for mine, fake in zip(tensors_in(made), tensors_in(node.meta["val"]), strict=False):
            if mine.is_floating_point() and mine.shape != fake.shape:
                raise NotEvaluatedError(f"{node.target} gives another shape in double precision")
        return made

    def _argument(self, each: Any, values: Mapping[Node, Any]) -> Any:
        if isinstance(each, torch.fx.Node):
            return values[each]
        if isinstance(each, torch.device):
            return self._device
        return _WIDE.get(each, each) if isinstance(each, torch.dtype) else each

    def _in_own_dtype(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """By a kernel that lacks double precision."""

        def narrow(each: Any) -> Any:
            if isinstance(each, torch.fx.Node):
                fakes = tensors_in(each.meta["val"])
                return values[each].to(fakes[0].dtype) if fakes else values[each]
            return self._device if isinstance(each, torch.device) else each

        args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), narrow)
        args, kwargs = _without_dropout(node, args, dict(kwargs))
        target: Any = node.target
        made = target(*args, **kwargs)
        self.is_exact = False
        return made

    def _fixed(self, node: Node, args: Any) -> Any:
        """What a random op or a batch norm gives here; None for others."""
        name = op_name(node)
        if name in ("_native_batch_norm_legit_functional", "native_batch_norm") and args[5]:
            return self._normalised(node, args)
        if name == "native_batch_norm_backward" and args[7]:
            mean, var = _statistics(args[1])
            target: Any = node.target
            inverse = (var + args[8]).rsqrt()  # no kernel of CUDA's does without, nor reads it
            return target(*args[:3], mean, var, mean, inverse, False, *args[8:])
        if not is_random(node) or _has_dropout_rate(node):
            return None
        fake = node.meta["val"]
        if name == "native_dropout":
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if not isinstance(fake, torch.Tensor):
            raise NotEvaluatedError(f"{node.target} draws more than one tensor")
        if name == "randperm":
            return torch.arange(fake.shape[0], dtype=fake.dtype, device=self._device)
        dtype = _WIDE.get(fake.dtype, fake.dtype)
        drawn = _DRAWN if dtype.is_floating_point else int(dtype == torch.bool)
        return torch.full(fake.shape, drawn, dtype=dtype, device=self._device)

    def _normalised(self, node: Node, args: Any) -> Any:
        x, weight, bias, mean, var, _, momentum, eps = args
        fixed = _statistics(x)
        made, *_ = aten.native_batch_norm(x, weight, bias, *fixed, False, momentum, eps)
        kept = (fixed[0], fixed[1], mean, var)
        return (made, *kept[: len(tensors_in(node.meta["val"])) - 1])


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])


def _wide(value: Any) -> Any:
    return value.to(_WIDE[value.dtype]) if getattr(value, "dtype", None) in _WIDE else value


def _has_dropout_rate(node: Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return any(argument.name == "dropout_p" for argument in schema.arguments)


def _without_dropout(node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
    """Arguments with a rate of dropout of 0."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p" and place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif argument.name == "dropout_p" and argument.name in kwargs:
            kwargs[argument.name] = 0.0
    return args, kwargs


def check_indices(node: Node, args: Sequence[Any]) -> None:
    """See that no kernel reads outside of a tensor, which would end the process's use of its GPU.

    Raises:
        NotEvaluatedError: An index is outside, or it is not known what integers mean.
    """
    read = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    whole = [a for a in read if a.dtype in (torch.int64, torch.int32)]
    if not whole:
        return
    name = op_name(node)
    if name in _INDICES:
        base = args[0]
        _check_range(node, _index_sizes(name, base, args))
    elif name in _LOSSES:
        target, ignored = args[1], args[4]
        _check_range(
            node, [(target[target != ignored], args[0].shape[-1 if args[0].ndim == 1 else 1])]
        )
    elif name.startswith("scatter"):
        _check_range(node, [(args[2], args[0].shape[args[1]])])
    elif name == "embedding_dense_backward":
        _check_range(node, [(args[1], args[2])])
    elif not (
        is_fusible(node)
        or view_bases(node)
        or name in _PLAIN
        or name.startswith(("nll_loss", *_ATTENTION))  # of the latter what their forward made
    ):
        raise NotEvaluatedError(f"{node.target} reads integers whose meaning is not known")


def _index_sizes(name: str, base: Any, args: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    if name == "embedding":
        return [(args[1], base.shape[0])]
    if name == "take":
        return [(args[1], base.numel())]
    if name in ("index", "index_put"):
        pairs = zip(args[1], base.shape, strict=False)
        return [(i, size) for i, size in pairs if i is not None and i.dtype != torch.bool]
    return [(args[2], base.shape[args[1]])]


def _check_range(node: Node, indices: Sequence[tuple[torch.Tensor, int]]) -> None:
    name = op_name(node)
    for index, size in indices:
        least = -size if name in _FROM_THE_END else 0
        if index.numel() and not least <= int(index.min()) <= int(index.max()) < size:
            raise KernelError(f"{node.target} reads outside of a tensor of {size} rows")


def why_too_large(gm: torch.fx.GraphModule, device: torch.device, is_made_up: bool) -> str:
    """Why a graph is not to be computed: time or memory; empty if it is."""
    flops = sum(count_flops(n) for n in gm.graph.nodes if n.op == "call_function")
    most = MAX_HOST_FLOPS if is_host(device.type) else MAX_FLOPS
    if not is_host(device.type) and torch.cuda.get_device_capability(device) in FAST_DOUBLE:
        most = MAX_FLOPS_FAST
    if flops > most:
        return f"a step takes {flops:.1e} floating-point operations, limit {most:.0e}"
    needed, most_bytes = peak_bytes(gm), _free_bytes(device)
    if is_made_up:
        most_bytes = min(most_bytes, MAX_MADE_UP_BYTES)
    if needed > most_bytes:
        size, limit = needed / 1e9, most_bytes / 1e9
        return f"a step takes {size:.1f} GB in double precision, limit {limit:.1f} GB"
    return ""


def peak_bytes(gm: torch.fx.GraphModule) -> int:
    """Most bytes of a graph's values at once, floating ones in double precision; views are free."""
    last: dict[Node, int] = {}
    nodes = list(gm.graph.nodes)
    for index, node in enumerate(nodes):
        for each in node.all_input_nodes:
            last[each] = index
    ending: dict[int, int] = {}
    now = most = 0
    for index, node in enumerate(nodes):
        if node.op == "output" or node not in last:
            continue
        made = 0 if view_bases(node) else sum(map(_wide_bytes, tensors_in(node.meta.get("val"))))
        now += made
        most = max(most, now)
        ending[last[node]] = ending.get(last[node], 0) + made
        now -= ending.pop(index, 0)
    return most


def _wide_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * _WIDE.get(tensor.dtype, tensor.dtype).itemsize)


def _free_bytes(device: torch.device) -> int:
    """What may be used: half of what is free on a GPU."""
    return MAX_BYTES if is_host(device.type) else int(torch.cuda.mem_get_info(device)[0]) // 2
