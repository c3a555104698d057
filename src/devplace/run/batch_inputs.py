"""The batch of a step: flattened as at capture and checked before anything runs."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.errors import InputError, ShapeError
from devplace.graph import Captured
from devplace.graph.program import RANDOM_KEYS
from devplace.run.copies import laid_out
from devplace.step_capture.batch import (
    Record,
    as_call,
    flatten_opened,
    leaf_names,
    open_dataclasses,
)
from devplace.step_capture.guards.values import differs

WAYS_OUT = (
    "Pad the batch, drop it (DataLoader(drop_last=True)), or in one process let the step know it: "
    "dp.parallelize(..., shapes=[batch]) or max_shapes=8."
)
"""Of a batch whose shape a step does not know."""


def bind_inputs(
    graph: Captured,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: Callable[[int, str, Any], Any] | None = None,
) -> dict[int, Any]:
    """Tensors of a batch by source op, laid out in memory as at capture.

    Args:
        graph: The captured step.
        args: Positional inputs of the step, nested as at capture; or one tuple, list or dict that
            holds all inputs, as capture takes them.
        kwargs: Named inputs of the step.
        whole: Makes an input (source op, name, value) of what is a part of it.

    Raises:
        InputError: Another nesting, an input that is no tensor or has another shape or dtype than
            captured, or another value of one that is no tensor; the message names it.
    """
    program = graph.program
    leaves, spec = _flatten_as(*as_captured_call(graph, args, kwargs), program.input_spec)
    if program.input_spec is not None and spec != program.input_spec:
        raise InputError(
            f"Inputs must be nested as at capture: got {_describe(spec)}, expected "
            f"{_describe(program.input_spec)}{_first_difference(spec, program.input_spec)}. Pass "
            f"the batch as you did to capture."
        )
    values = {}
    for binding in program.bindings:
        if binding.kind == "input":
            value = leaves[int(binding.slot)]
            if whole is not None:
                value = whole(binding.op, binding.key, value)
            _check(graph, binding.op, binding.key, value)
            values[binding.op] = laid_out(value, binding.strides)
    for index, fixed in program.input_constants.items():
        if type(leaves[index]) is not type(fixed) or differs(leaves[index], fixed):
            name = _leaf_name(args, kwargs, index)
            raise InputError(
                f"Inputs that are not tensors are fixed at capture: {name!r} is "
                f"{_shown(leaves[index])}, captured with {_shown(fixed)}. Capture again for this "
                f"value."
            )
    return values


def require_values(graph: Captured, values: Mapping[int, Any]) -> None:
    """Refuse a batch of which a tensor is on the meta device.

    Raises:
        InputError: Names it.
    """
    op = next((op for op, value in values.items() if value.is_meta), None)
    if op is not None:
        name = next(b.key for b in graph.program.bindings if b.op == op)
        raise InputError(
            f"To run, a batch needs values: input {name!r} is on the meta device. Pass a tensor on "
            f"the CPU or a GPU."
        )


def bind_scalars(
    graph: Captured, step: int, param_groups: Sequence[Mapping[str, Any]] | None
) -> dict[int, Any]:
    """Zero-dimensional tensors of the step's scalars (learning rate ...) by source op.

    Random keys are not among them: executors make those.

    Args:
        graph: The captured step.
        step: 1-based number of the step.
        param_groups: The optimizer's present groups, read for learning rates.
    """
    bindings = [
        binding
        for binding in graph.program.bindings
        if binding.kind == "scalar" and binding.key != RANDOM_KEYS
    ]
    if not bindings:
        return {}
    numbers = graph.program.scalars(step, param_groups)
    values = {}
    for binding in bindings:
        tensor = graph.tensors[graph.ops[binding.op].outputs[0]]
        dtype = getattr(torch, tensor.dtype)
        values[binding.op] = torch.full(
            tensor.shape, numbers[binding.key], dtype=dtype, device="cpu"
        )
    return values


def as_captured_call(
    graph: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments of a step as at capture: opened, if one holds all inputs."""
    spec = graph.program.input_spec
    if len(args) == 1 and not kwargs and _flatten_as(args, kwargs, spec)[1] != spec:
        whole = as_call(args[0])
        if _flatten_as(*whole, spec)[1] == spec:
            return whole
    return args, kwargs


def _flatten_as(args: Sequence[Any], kwargs: Mapping[str, Any], spec: Any) -> tuple[list[Any], Any]:
    opened = open_dataclasses((tuple(args), dict(kwargs)))
    if spec is not None:
        opened = _in_captured_order(opened, spec)
    return flatten_opened(opened)


def _in_captured_order(tree: Any, spec: Any) -> Any:
    """Dicts may have their keys in any order; torch's pytree keeps the order it finds."""
    if type(tree) is not spec.type:
        return tree
    children = spec.children()
    if isinstance(tree, Record) and len(tree.fields) == len(children):
        fields = zip(tree.fields.items(), children, strict=True)
        ordered = {n: _in_captured_order(v, child) for (n, v), child in fields}
        return Record(tree.kind, ordered, tree.keys)
    if type(tree) in (dict, OrderedDict, defaultdict):
        names = spec.context[1] if isinstance(tree, defaultdict) else spec.context
        if set(names) != set(tree):
            return tree
        ordered = copy(tree)  # of its own kind, with its factory
        ordered.clear()
        for name, child in zip(names, children, strict=True):
            ordered[name] = _in_captured_order(tree[name], child)
        return ordered
    if type(tree) in (tuple, list) and len(tree) == len(children):
        return type(tree)(map(_in_captured_order, tree, children))
    return tree


def _shown(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"a tensor of shape {list(value.shape)}" if is_tensor else repr(value)


def _first_difference(spec: Any, expected: Any) -> str:
    """Names the first input that only one of two nestings has."""
    mine, theirs = (_names(each) for each in (spec, expected))
    for what, names, others in (("without", theirs, mine), ("with", mine, theirs)):
        for name in names:
            if name not in others:
                return f", {what} {name!r}"
    return ", in other containers (tuple, list, dict)" if len(mine) == len(theirs) else ""


def _names(spec: Any) -> list[str]:
    args, kwargs = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    trees = [*((str(k), arg) for k, arg in enumerate(args)), *kwargs.items()]
    return [name for key, tree in trees for name in leaf_names(key, open_dataclasses(tree))]


def _leaf_name(args: Sequence[Any], kwargs: Mapping[str, Any], index: int) -> str:
    opened_args, opened_kwargs = open_dataclasses((tuple(args), dict(kwargs)))
    trees = [*((str(k), arg) for k, arg in enumerate(opened_args)), *opened_kwargs.items()]
    return [name for key, tree in trees for name in leaf_names(key, tree)][index]


def _check(graph: Captured, op: int, name: str, value: Any) -> None:
    tensor = graph.tensors[graph.ops[op].outputs[0]]
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"Input {name!r} must be a tensor as at capture, got {type(value).__name__}."
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise InputError(f"Inputs must be dense: {name!r} is {kind}. Make it a dense tensor.")
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if shape != tensor.shape:
        culprit = f"Input {name!r} has shape {list(shape)}"
        raise ShapeError(
            f"{culprit}, the step was captured with {list(tensor.shape)}. {WAYS_OUT}", culprit
        )
    if dtype != tensor.dtype:
        raise InputError(
            f"Input {name!r} has dtype {dtype}, the step was captured with {tensor.dtype}. "
            f"Convert it with .to(torch.{tensor.dtype}), or capture again."
        )


def _describe(spec: Any) -> str:
    args, kwargs = spec.children()[:2]
    text = f"{args.num_children} positional"
    names = kwargs.context or []
    if names:
        text += f" and named {', '.join(map(str, names))}"
    return f"{text} ({spec.num_leaves} values in all)"
