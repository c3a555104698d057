"""Looking up what the names in a function stand for."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from devplace.graph.capture.names import Every, Item, Part, Perhaps
from devplace.graph.capture.tags import is_user_file
from devplace.graph.capture.values import NOTHING, is_list_or_dict, is_single

CACHE = type(functools.lru_cache(lambda: None))
WRITERS = ("append", "appendleft", "extend", "insert", "add", "update", "clear", "discard")


def is_read_whole(value: Any, part: Part) -> bool:
    """Whether an attribute of a value, mostly a method, is computed of all of it."""
    if isinstance(part, (Item, Every)):
        return False
    name = part.key if isinstance(part, Perhaps) else part
    if is_list_or_dict(value):
        return name not in WRITERS
    if isinstance(value, tuple):
        return name not in getattr(type(value), "_fields", ())
    return is_single(value)


def function_behind(found: Any) -> Callable[..., Any] | None:
    """The function of a method, property or cache of a class."""
    if isinstance(found, property):
        return found.fget
    if isinstance(found, functools.cached_property):
        return found.func
    if isinstance(found, CACHE):
        return found.__wrapped__
    found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    return found if isinstance(found, types.FunctionType) else None


def defaults_of(function: Any) -> dict[str, tuple[Mapping[str, Any], str]]:
    """Arguments of a function with a default: name -> what holds it, and its key there."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    given = dict(zip(names[len(names) - len(values) :], values, strict=True))
    named_only = function.__kwdefaults__ or {}
    return {key: (given, key) for key in given} | {key: (named_only, key) for key in named_only}


def looked_up(value: Mapping[Any, Any], part: Item) -> Any:
    """An item by the mapping's own rules; `NOTHING` if there is none."""
    try:
        return value.get(part.key, NOTHING)
    except Exception:
        return NOTHING


def attribute_of(value: Any, part: str) -> Any:
    """An attribute by the object's own rules, which may raise whatever they like."""
    try:
        return getattr(value, part, NOTHING)
    except Exception:
        return NOTHING


def is_package(value: Any) -> bool:
    """Whether a value is a module of Python that is not the user's."""
    is_module = isinstance(value, types.ModuleType)
    return is_module and not is_users(getattr(value, "__file__", None) or "")


@functools.cache
def is_users(filename: str) -> bool:
    """Whether code is the user's; that from `exec`, stdin or a notebook has no file."""
    if filename.startswith("<"):
        return not filename.startswith(("<frozen", "<eval_with_key>", "<__array_function__"))
    return bool(filename) and is_user_file(filename) and "-packages" not in filename
