"""Ops that write, which torch's tracer or its functional form cannot take, as others that do."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._guards import detect_fake_mode

from devplace.errors import CaptureError
from devplace.graph.capture.ctc import FIXED

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten
_NAMESPACE = "devplace"
_library: Any = None
_originals: dict[str, Any] = {}  # name of a functional operator -> what it is made of


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
    kinds = [str(schema.arguments[k].type) for k in _written(target)]
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
    is_torchs = target.namespace in ("aten", "prims", "prim", _NAMESPACE)
    return not is_torchs and target._schema.is_mutable


def _returns_written(target: Any) -> bool:
    return any(each.alias_info is not None for each in target._schema.returns)


def _written(target: Any) -> list[int]:
    """Places of the arguments that an operator writes."""
    arguments = target._schema.arguments
    return [
        k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]


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
    first, written = len(target._schema.returns), _written(target)
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


def functional(target: Any) -> Any:
    """The operator that gives what `target` returns, and then what the arguments it writes become.

    It is made of the operator itself, on copies of these arguments; each process makes its own.
    """
    global _library
    name = f"{target.namespace}_{target._schema.name.partition('::')[2]}_{target._overloadname}"
    if _library is None:
        _library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    if not hasattr(getattr(torch.ops, _NAMESPACE), name):
        schema, written = target._schema, _written(target)
        arguments = _declared(schema)
        first_named = next((k for k, a in enumerate(schema.arguments) if a.kwarg_only), None)
        returned = [str(each.type) for each in schema.returns]
        returned += [arguments[k].partition(" ")[0] for k in written]
        _library.define(f"{name}({', '.join(arguments)}) -> ({', '.join(returned)})")
        _library.impl(name, _on_copies(target, written, first_named), "CompositeExplicitAutograd")
        _originals[f"{_NAMESPACE}::{name}"] = target
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def original(target: Any) -> Any:
    """The operator that one is the functional form of; None if it is of its own."""
    return _originals.get(target._schema.name)


def _declared(schema: Any) -> list[str]:
    """The arguments in the language of schemas, all positional, and only read."""
    text = re.sub(r"\(\w+!?\)|\[.*?(?=\])|=\[[^\]]*\]", _without_content, str(schema))
    inner = text[text.index("(") + 1 : text.rindex(") ->")]
    return [part.partition("=")[0] for part in inner.split(", ") if part != "*"]


def _without_content(match: re.Match[str]) -> str:
    """Nothing for an alias mark or a default; a list type keeps its bracket."""
    return "[" if match.group().startswith("[") else ""


def _on_copies(target: Any, written: list[int], first_named: int | None) -> Callable[..., Any]:
    names = [a.name for a in target._schema.arguments]

    def call(*args: Any) -> Any:
        copied = list(args)
        for place in written:
            if isinstance(copied[place], torch.Tensor):
                copied[place] = copied[place].clone()
        positional, named = copied[:first_named], copied[len(copied[:first_named]) :]
        returned = target(*positional, **dict(zip(names[len(positional) :], named, strict=True)))
        first = () if returned is None else returned
        made = (*(first if isinstance(first, tuple) else (first,)), *(copied[k] for k in written))
        return made if len(made) > 1 else made[0]

    return call
