"""Signatures of ops: two ops with the same signature cost the same.

Reads FX graphs but does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from devplace.cost.reuse import NONE, ColdInputs, cold_inputs
from devplace.graph import Captured


class TensorSpec(NamedTuple):
    """A tensor argument of an op.

    Attributes:
        shape: Sizes.
        stride: Strides, elements.
        dtype: torch name without prefix.
        bound: For integers that are made up: values are from 0 to below this, so that indices are
            valid; else 0.
        is_cold: Whether it is no longer in a cache when the op reads it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    bound: int = 0
    is_cold: bool = False


class OpCall(NamedTuple):
    """A call to time.

    Attributes:
        target: The op, as in the FX graph.
        args, kwargs: Its arguments, with a `TensorSpec` in place of every tensor.
        key: Equal for calls that cost the same.
        node: Name of an FX node that makes it.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str
    node: str = ""


def op_calls(
    graph: Captured, cold: ColdInputs | None = None, only: Collection[int] | None = None
) -> dict[int, OpCall]:
    """The call of every op that does some work, by op index.

    Args:
        graph: A captured step.
        cold: Which inputs come from memory; default: those of the trace's order.
        only: The ops whose calls are wanted; default: all.
    """
    program = graph.program
    if cold is None:
        cold = cold_inputs(graph, range(len(graph.ops)))
    calls: dict[int, OpCall] = {}
    for node in program.module.graph.nodes:
        if node.op != "call_function" or node.name not in program.op_of:
            continue
        index = program.op_of[node.name]
        if index in calls or graph.ops[index].is_view or graph.ops[index].is_source:
            continue
        if only is not None and index not in only:
            continue
        from_memory = cold.get(index, NONE)
        names = {program.tensor_of.get(other.name): other for other in node.all_input_nodes}
        specs = {
            other: _spec(other.meta["val"], tensor in from_memory)
            for tensor, other in names.items()
            if hasattr(other.meta.get("val"), "stride")
        }
        call = make_call(node.target, node.args, node.kwargs, specs)
        calls[index] = call._replace(node=node.name)
    return calls


def make_call(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], specs: Mapping[Any, TensorSpec]
) -> OpCall:
    """A call with specs in place of FX nodes; integer tensors get a valid range of values."""
    filled = tuple(_replaced(arg, specs) for arg in args)
    named = {name: _replaced(value, specs) for name, value in kwargs.items()}
    filled, named = _with_bounds(target, filled, named)
    return OpCall(target, filled, named, f"{target}{filled!r}{sorted(named.items())!r}")


def _spec(value: Any, is_cold: bool) -> TensorSpec:
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return TensorSpec(shape, stride, str(value.dtype).removeprefix("torch."), 0, is_cold)


def _replaced(arg: Any, specs: Mapping[Any, TensorSpec]) -> Any:
    if isinstance(arg, dict):
        return {key: _replaced(value, specs) for key, value in arg.items()}
    if isinstance(arg, (list, tuple)):
        return [_replaced(item, specs) for item in arg]
    if type(arg).__name__ == "device":
        return DEVICE
    return specs.get(arg, arg) if hasattr(arg, "all_input_nodes") else arg


class _Device:
    def __repr__(self) -> str:
        return "device"

    def __reduce__(self) -> str:
        return "DEVICE"


DEVICE = _Device()
"""Stands for the torch device an op is timed on."""


def _with_bounds(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = _bound(str(target), args)
    names = {name: _bounded(value, bound) for name, value in kwargs.items()}
    return tuple(_bounded(arg, bound) for arg in args), names


def _bounded(arg: Any, bound: int) -> Any:
    if isinstance(arg, TensorSpec):
        return arg._replace(bound=bound) if arg.dtype in INTEGERS else arg
    if isinstance(arg, list):
        return [_bounded(item, bound) for item in arg]
    return arg


INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def _bound(target: str, args: tuple[Any, ...]) -> int:
    """Integer tensors of this call are indices below this; 1, so all zeros, where what they mean is
    not known: zeros are valid as indices, and as offsets, which must not fall."""
    name = target.removeprefix("aten.").partition(".")[0]
    tensors = [arg for arg in args if isinstance(arg, TensorSpec)]
    if name in ("embedding", "index_put", "index", "_unsafe_index", "_unsafe_index_put"):
        return max(1, min(tensors[0].shape or (1,)) if name != "embedding" else tensors[0].shape[0])
    if name == "embedding_dense_backward":
        return int(args[2])
    if name in ("gather", "scatter", "scatter_add", "index_select", "scatter_reduce", "index_add"):
        return max(1, tensors[0].shape[args[1]] if tensors[0].shape else 1)
    if name == "nll_loss_forward":
        return max(1, tensors[0].shape[-1])
    if name == "nll_loss_backward":
        return max(1, tensors[1].shape[-1])
    if name == "max_pool2d_with_indices_backward":
        return max(1, tensors[1].shape[-1] * tensors[1].shape[-2])
    return 1
