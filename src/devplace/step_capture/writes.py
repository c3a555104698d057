"""Rewrite in-place ops that torch cannot trace or make functional."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._guards import detect_fake_mode

from devplace.errors import CaptureError
from devplace.graph.functional_ops import NAMESPACE, functional, written_places
from devplace.step_capture.ctc import FIXED

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten


def write_node(
    create: Callable[..., Any], kind: str, target: Any, args: Any, kwargs: Any, where: str
) -> Any:
    """Make a node of a trace by others, if it is one of these; else None.

    `x.random_(low, high)` becomes `x.random_(high - low).add_(low)`: an argument called `from` is
    no Python. Zeros that torch knows as such become plain ones, a CTC loss one of a fixed size. A
    custom operator that writes arguments becomes one that gives their new values, and copies of
    these.

    Args:
        create: Makes a node, as `torch.fx.Tracer.create_node`.
        kind, target, args, kwargs: Of the node that is wanted.
        where: Where it is made, for messages.

    Raises:
        CaptureError: A custom operator writes or gives lists, or is given what is no tensor of it.
    """
    if kind != "call_function":
        return None
    if target in FIXED:
        return create(kind, FIXED[target], args, kwargs)
    if target is aten._efficientzerotensor.default:
        return create(kind, aten.zeros.default, args, kwargs)
    if target is getattr(aten.random_, "from"):
        return _random(create, *args, **kwargs)
    if isinstance(target, torch._ops.OpOverload) and _is_custom(target):
        _refuse_lists(target, args, kwargs, where)
        return _custom(create, target, args, kwargs)
    return None


def _refuse_lists(target: Any, args: Any, kwargs: Any, where: str) -> None:
    schema = target._schema
    kinds = [str(schema.arguments[k].type) for k in written_places(target)]
    kinds += [str(each.type) for each in schema.returns]
    is_plain = all(kind in ("Tensor", "Optional[Tensor]") for kind in kinds)
    if is_plain and not _returns_written(target):
        nodes = [n for n in pytree.tree_leaves((args, kwargs)) if isinstance(n, torch.fx.Node)]
        if all("val" in node.meta for node in nodes):
            return
    raise CaptureError(
        f"A custom operator that writes its arguments can be captured if these, and what it "
        f"returns, are different tensors of the step: {target} at {where} writes or gives lists, "
        f"gives what it writes, or is given a tensor made outside. Let it return new tensors, and "
        f"copy them."
    )


def _random(create: Callable[..., Any], x: Node, low: int, high: int | None, **rest: Any) -> Any:
    if high is None:
        return None
    made = create("call_function", aten.random_.to, (x, high - low), rest)
    made.meta["val"] = x.meta["val"]
    return create("call_function", aten.add_.Tensor, (made, low), {}) if low else made


def _is_custom(target: Any) -> bool:
    is_torchs = target.namespace in ("aten", "prims", "prim", NAMESPACE)
    return not is_torchs and target._schema.is_mutable


def _returns_written(target: Any) -> bool:
    return any(each.alias_info is not None for each in target._schema.returns)


def _custom(create: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
    names = [a.name for a in target._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    ordered = tuple((defaults | given)[name] for name in names)
    function = functional(target)
    call = create("call_function", function, ordered, {})
    values = torch.fx.node.map_arg(ordered, lambda node: node.meta["val"])
    mode = detect_fake_mode(values)
    with mode:
        call.meta["val"] = made = function(*values)
    first, written = len(target._schema.returns), written_places(target)
    is_one = first + len(written) == 1
    for index, place in enumerate(written):
        if isinstance(ordered[place], torch.fx.Node):
            part = call
            if not is_one:
                part = create("call_function", operator.getitem, (call, first + index), {})
                part.meta["val"] = made[first + index]
            copied = create("call_function", aten.copy_.default, (ordered[place], part), {})
            copied.meta["val"] = ordered[place].meta["val"]
    if first == 1:
        return create("call_function", operator.getitem, (call, 0), {})
    return call
