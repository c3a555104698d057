"""Custom operators that write their arguments, as operators that give the new values instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "devplace"
_library: Any = None
_originals: dict[str, Any] = {}  # name of a functional operator -> what it is made of


def functional(target: Any) -> Any:
    """The operator that gives what `target` returns, and then what the arguments it writes become.

    It is made of the operator itself, on copies of these arguments; each process makes its own.
    """
    global _library
    name = f"{target.namespace}_{target._schema.name.partition('::')[2]}_{target._overloadname}"
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        schema, written = target._schema, written_places(target)
        arguments = _declared(schema)
        first_named = next((k for k, a in enumerate(schema.arguments) if a.kwarg_only), None)
        returned = [str(each.type) for each in schema.returns]
        returned += [arguments[k].partition(" ")[0] for k in written]
        _library.define(f"{name}({', '.join(arguments)}) -> ({', '.join(returned)})")
        _library.impl(name, _on_copies(target, written, first_named), "CompositeExplicitAutograd")
        _originals[f"{NAMESPACE}::{name}"] = target
    return getattr(getattr(torch.ops, NAMESPACE), name).default


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


def written_places(target: Any) -> list[int]:
    """Places of the arguments that an operator writes."""
    arguments = target._schema.arguments
    return [
        k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
