"""Values that can be guarded: kept, copied, compared and shown."""

from __future__ import annotations

import enum
import functools
import random
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (
    *(int, float, bool, str, bytes, complex, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FUNCTION = (types.FunctionType, types.BuiltinFunctionType)
_CALLED = (functools.partial, types.MethodType, type)
_KNOWN = (*_PLAIN, *_FUNCTION, *_CALLED, torch.Tensor, torch.nn.Module)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_LISTS = (list, deque, array, bytearray)
_SETS = (set, frozenset)
_OF_PARTIAL = ("func", "args", "keywords")
_MAX_PARTS = 1000
_MAX_NUMBERS = 10_000
_LONGEST = 200
NOTHING = object()
"""Stands for no value."""
ANYTHING = object()
"""Stands for a part of a value that may be whatever it likes."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, an enum, a dtype or device, or made of such."""
    parts = leaves(value)
    return parts is not None and all(isinstance(p, _PLAIN) or is_array(p) for p in parts)


def is_kept(value: Any) -> bool:
    """Whether a value is plain, of torch, can be called, or is a container, and not too large.

    Of the parts of a container other objects are left out.
    """
    if isinstance(value, _KNOWN) or is_called(value):
        return True
    return (_is_container(value) or is_array(value)) and leaves(value) is not None


def is_function(value: Any) -> bool:
    """Whether a value is a function; one defined again by the same text is the same."""
    return isinstance(value, _FUNCTION)


def is_called(value: Any) -> bool:
    """Whether a value is an object of a class with `__call__`, written in Python."""
    return isinstance(vars(type(value)).get("__call__"), types.FunctionType)


def is_computed_with(value: Any) -> bool:
    """Whether a value is no plain one but does something: a tensor, module, function, class."""
    kinds = (*_FUNCTION, *_CALLED, torch.Tensor, torch.nn.Module)
    return isinstance(value, kinds) or is_called(value)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python's or NumPy's that has a state."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    kind = type(value)
    return kind.__module__.startswith("numpy.random") and kind.__name__.startswith(
        ("Generator", "RandomState")
    )


def is_list_or_dict(value: Any) -> bool:
    """Whether a value is a container of Python's that can be written to."""
    return type(value) in (*_DICTS, *_LISTS, set)


def is_traced(value: Any) -> bool:
    """Whether a value is a tensor of a trace, without values: a fake one, or one that a transform
    of torch.func (grad, vmap) has wrapped."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and is_wrapped(value))


def holds_fakes(value: Any) -> bool:
    """Whether tensors without values are in a value that can be kept."""
    return any(map(is_traced, leaves(value) or ()))


def _is_container(value: Any) -> bool:
    return isinstance(value, tuple) or type(value) in (*_DICTS, *_LISTS, *_SETS)


def is_array(value: Any) -> bool:
    """Whether a value is a number or array of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def is_inside(addresses: Iterable[int], array: Any) -> bool:
    """Whether one of some addresses lies in the memory of an array of NumPy."""
    begin = int(array.__array_interface__["data"][0])
    return any(begin <= each < begin + array.nbytes for each in addresses)


def _parts(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def leaves(value: Any) -> list[Any] | None:
    """What is in containers in containers; None if it is too much."""
    todo, found = [value], []
    while todo:
        part = todo.pop()
        if is_array(part) and part.size > _MAX_NUMBERS:
            return None
        if _is_container(part):
            todo += _parts(part)
        else:
            found.append(part)
        if len(todo) + len(found) > _MAX_PARTS:
            return None
    return found


def kept(value: Any) -> Any:
    """A value that can be kept, as it is now, whatever is done to the containers in it."""
    return mapped(lambda part: part, value)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with other leaves; its containers are new ones."""
    if is_array(value):
        return change(value.copy())
    if not _is_container(value):
        return change(value)
    if isinstance(value, (array, bytearray)):
        return value[:]
    if isinstance(value, dict):
        made = value.copy()
        for key, part in value.items():
            made[key] = mapped(change, part)
        return made
    if type(value) in _SETS:
        return value.copy()
    parts = [mapped(change, part) for part in value]
    if isinstance(value, deque):
        return deque(parts, value.maxlen)
    if type(value) is list:
        return parts
    if all(map(is_, parts, value)):
        return value
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)


def shown(value: Any) -> str:
    """A value in a message: its text if that is short."""
    if value is NOTHING:
        return "not set"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return f"a module of {type(value).__name__}"
    if is_function(value):
        return f"function {value.__name__}"
    if isinstance(value, type):
        return f"class {value.__name__}"
    if isinstance(value, _CALLED) or is_called(value):
        return f"a {type(value).__name__}"
    text = " ".join(_text(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _text(value: Any) -> str:
    """As `repr`, with few words for what is of torch."""
    if type(value) in _DICTS:
        return "{" + ", ".join(f"{key!r}: {_part(part)}" for key, part in value.items()) + "}"
    if type(value) in (list, tuple, deque) and not is_plain(value):
        return "[" + ", ".join(map(_part, value)) + "]"
    return repr(value)


def _part(value: Any) -> str:
    return "..." if value is ANYTHING else shown(value)


def differs(now: Any, value: Any) -> bool:
    """Whether a value is another one now; a NaN is itself."""
    if value is ANYTHING:
        return False
    if _is_container(value):
        return type(now) is not type(value) or _has_other_parts(now, value)
    if now is value and not is_array(value):
        return False
    if isinstance(value, (torch.nn.Module, types.BuiltinFunctionType)):
        return True
    if isinstance(value, _CALLED) or is_called(value):
        return type(now) is not type(value) or _calls_other(now, value)
    if isinstance(value, types.FunctionType):
        is_function_now = isinstance(now, types.FunctionType)
        return not is_function_now or not _is_same_code(now.__code__, value.__code__)
    if isinstance(value, torch.Tensor):
        return not isinstance(now, torch.Tensor) or not _is_equal(now, value)
    if is_array(value) and value.shape:
        is_alike = type(now) is type(value) and now.shape == value.shape
        return not is_alike or now.tobytes() != value.tobytes()
    return (type(now) is not type(value) and not is_plain(now)) or _is_other(now, value)


def difference(now: Any, value: Any) -> tuple[str, Any, Any]:
    """Where two values that differ do so first, such as `[2]`, and what is there in each."""
    is_alike = type(now) is type(value) and _is_container(value) and type(value) not in _SETS
    if not is_alike or (len(now) != len(value) and not isinstance(value, dict)):
        return "", now, value
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        mine = now.get(key, NOTHING) if isinstance(now, dict) else now[key]
        if _is_other_part(mine, value[key]):
            path, *both = difference(mine, value[key])
            return (f"[{key!r}]{path}", *both)
    return "", now, value


def _has_other_parts(now: Any, value: Any) -> bool:
    """Whether two containers of one type differ in what can be kept; caches of tensors may grow."""
    may_grow = isinstance(value, dict) and len(now) > len(value) and not is_plain(value)
    if len(now) != len(value) and not may_grow:
        return True
    if type(value) in _SETS:
        return bool(now != value)
    if not isinstance(value, dict):
        # a copy of a list or an array is never the one it was made of
        return not all(map(is_, now, value)) and any(map(_is_other_part, now, value))
    return any(_is_other_part(now.get(key, NOTHING), part) for key, part in value.items())


def _is_other_part(now: Any, value: Any) -> bool:
    is_copied = _is_container(value) or is_array(value)
    if now is value and not is_copied:
        return False
    return (is_copied or isinstance(value, _KNOWN) or is_called(value)) and differs(now, value)


def _calls_other(now: Any, value: Any) -> bool:
    """Whether two classes, methods, partial functions or callable objects differ; one defined or
    made again alike is the same.
    """
    if isinstance(value, type):
        return (now.__module__, now.__qualname__) != (value.__module__, value.__qualname__)
    if isinstance(value, types.MethodType):
        return now.__self__ is not value.__self__ or differs(now.__func__, value.__func__)
    if isinstance(value, functools.partial):
        return any(_is_other_part(getattr(now, n), getattr(value, n)) for n in _OF_PARTIAL)
    return _has_other_parts(getattr(now, "__dict__", {}), getattr(value, "__dict__", {}))


def _is_other(now: Any, value: Any) -> bool:
    try:
        return bool(now != value) and bool(now == now or value == value)
    except Exception:  # arrays inside
        return True


def _is_same_code(one: Any, other: Any) -> bool:
    """Whether code does the same, wherever its text stands."""
    if not isinstance(one, types.CodeType) or not isinstance(other, types.CodeType):
        return type(one) is type(other) and bool(one == other)
    kinds = ("co_code", "co_names", "co_varnames", "co_freevars", "co_flags")
    pairs = zip(one.co_consts, other.co_consts, strict=False)
    return (
        all(getattr(one, kind) == getattr(other, kind) for kind in kinds)
        and len(one.co_consts) == len(other.co_consts)
        and all(_is_same_code(a, b) for a, b in pairs)
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values; one without values equals only itself."""
    if any(isinstance(t, FakeTensor) or t.is_meta for t in (one, other)):
        return False
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return one.layout == other.layout == torch.strided and bool(torch.equal(one, other))
