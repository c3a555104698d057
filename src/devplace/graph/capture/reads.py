"""Which plain attributes of modules a step reads while it is traced: a captured step keeps them."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_PLAIN = (
    *(int, float, bool, str, bytes, complex, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FUNCTION = (types.FunctionType, types.BuiltinFunctionType)
_MOST_PARTS = 64
_LONGEST = 200
_MODULE_OWN = (frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))) - {"training"}
NOTHING = object()
"""Stands for no value."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, an enum, a dtype or device, or a few of such."""
    if isinstance(value, _PLAIN):
        return True
    if (isinstance(value, tuple) or type(value) in (list, set, frozenset)) and len(
        value
    ) <= _MOST_PARTS:
        return all(is_plain(part) for part in value)
    if type(value) is dict and len(value) <= _MOST_PARTS:
        return all(is_plain(part) for part in value.values())
    return _is_array(value) and value.size <= _MOST_PARTS


def _is_array(value: Any) -> bool:
    """Whether a value is a number or array of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def kept(value: Any) -> Any:
    """A plain value that stays as it is, whatever is done to lists and dicts in it."""
    is_mutable = type(value) in (tuple, list, dict, set) or _is_array(value)
    return deepcopy(value) if is_mutable else value


def with_values(value: Any) -> Any:
    """A value with zeros for tensors that have no values, such as a trace leaves behind."""

    def zeros(tensor: Any) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with _disable_current_modes():
        return kept(tree_map_only(FakeTensor, zeros, value))


def is_made_of_nothing(value: Any) -> bool:
    """Whether a trace has left tensors that depend on none of its inputs, as a cache of masks."""
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor)]
    mode = get_proxy_mode()
    return bool(found) and mode is not None and not any(_has_inputs(t, mode.tracer) for t in found)


def _has_inputs(tensor: torch.Tensor, tracer: Any) -> bool:
    slot: Any = get_proxy_slot(tensor, tracer, None)
    todo, seen = [] if slot is None else [slot.proxy.node], set()
    while todo:
        node = todo.pop()
        if node.op in ("placeholder", "get_attr") or _is_random(node):
            return True
        seen.add(node)
        todo += [each for each in node.all_input_nodes if each not in seen]
    return slot is None


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


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
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def is_function(value: Any) -> bool:
    """Whether a value is a function; one defined again by the same text is the same."""
    return isinstance(value, _FUNCTION)


def differs(now: Any, value: Any) -> bool:
    """Whether a value is another one now; a NaN is itself."""
    if now is value and not _is_array(value):
        return False
    if isinstance(value, (torch.nn.Module, types.BuiltinFunctionType)):
        return True
    if isinstance(value, types.FunctionType):
        is_function_now = isinstance(now, types.FunctionType)
        return not is_function_now or not _is_same_code(now.__code__, value.__code__)
    if isinstance(value, torch.Tensor):
        return not isinstance(now, torch.Tensor) or not _is_equal(now, value)
    if _is_array(value) and value.shape:
        is_alike = type(now) is type(value) and now.shape == value.shape
        return not is_alike or now.tobytes() != value.tobytes()
    return (type(now) is not type(value) and not is_plain(now)) or _is_other(now, value)


def _is_other(now: Any, value: Any) -> bool:
    try:
        return bool(now != value)
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


@dataclass(frozen=True)
class Variable:
    """A global, enclosed variable, attribute or item that a function reads.

    Attributes:
        name: As the user wrote it, such as `args.beta`.
        holder: Cell, mapping or object that holds it.
        key: Its key in the mapping, or name in the object.
        value: When it was found.
        is_attribute: Whether the holder is an object.
        above: Where the holder was found; if another object is there now, that one holds it.
    """

    name: str
    holder: Any
    key: Any
    value: Any
    is_attribute: bool = False
    above: Variable | None = None

    def present(self) -> Any:
        """Its value now; `NOTHING` if it is gone."""
        if isinstance(self.holder, types.CellType):
            return enclosed(self.holder)
        holder, is_attribute = self.holder, self.is_attribute
        above = self.above
        if above is not None and above.holder is not None:
            now = above.present()
            if now is not above.value:
                is_attribute = is_attribute or holder is not above.value
                holder = now
        try:
            if is_attribute:
                return getattr(holder, self.key, NOTHING)
            return holder.get(self.key, NOTHING)
        except Exception:  # by the rules of an object of the user's
            return NOTHING

    def put(self, value: Any) -> None:
        """Give it another value; a list or dict stays the same object."""
        now = self.present()
        if type(now) is type(value) and isinstance(now, list):
            now[:] = kept(value)
        elif type(now) is type(value) and isinstance(now, dict):
            now.clear()
            now.update(kept(value))
        elif isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif self.is_attribute:
            setattr(self.holder, self.key, value)
        elif value is NOTHING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


class Reads:
    """Follows the attributes of some modules while they run.

    Attributes:
        values: Name of the module -> attribute -> value, of what is read before it is written.
        changed: Those that end with another value, with that value; they are not in `values`.

    Args:
        modules: Name -> module.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.changed: list[tuple[Variable, Any]] = []
        self._modules = dict(modules)
        self._found = {id(module): self.values.setdefault(n, {}) for n, module in modules.items()}
        self._written: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow reads and writes inside, and see at the end what has another value."""
        own: Any = torch.nn.Module
        was = {n: vars(own).get(n, NOTHING) for n in ("__getattribute__", "__setattr__")}
        own.__getattribute__ = self._getter(own.__getattribute__)
        own.__setattr__ = self._setter(own.__setattr__)
        try:
            yield
        finally:
            for name, function in was.items():
                if function is NOTHING:
                    delattr(own, name)
                else:
                    setattr(own, name, function)
        self._compare()

    def variables(self, without: Collection[str] = ()) -> list[Variable]:
        """What was read of all modules but some."""
        found = []
        for name, values in self.values.items():
            if name in without:
                continue
            own = vars(self._modules[name])
            for key, value in values.items():
                holder = own if key in own else _class_of(self._modules[name], key)
                found.append(Variable(f"{key} of {name}", holder, key, value))
        return found

    def _getter(self, get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        found, written = self._found, self._written

        def read(module: Any, name: str) -> Any:
            value = get(module, name)
            known = found.get(id(module)) if name not in _MODULE_OWN else None
            if known is None or name in known or (id(module), name) in written:
                return value
            if is_plain(value) or is_function(value):
                known[name] = kept(value)
            return value

        return read

    def _setter(self, put: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        found, written = self._found, self._written

        def write(module: Any, name: str, value: Any) -> None:
            if id(module) in found:
                written.add((id(module), name))
            put(module, name, value)

        return write

    def _compare(self) -> None:
        """Keep attributes of a module or its class that are as they were; note the others."""
        for name, found in self.values.items():
            module = self._modules[name]
            for key, value in list(found.items()):
                now = attribute(module, key)
                if now is NOTHING or not (is_plain(now) or is_function(now)):
                    del found[key]  # of a property, say
                elif differs(now, value):
                    del found[key]
                    where = f"{key!r} of module {name!r}" if name else f"{key!r} of the model"
                    self.changed.append((Variable(where, vars(module), key, value), kept(now)))


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Attribute of a module itself or a value of its class; nothing is computed."""
    if name in vars(module):
        return vars(module)[name]
    return _class_of(module, name).get(name, NOTHING)


def _class_of(module: torch.nn.Module, name: str) -> Mapping[str, Any]:
    """Names of the class that has an attribute; none if there is no such class."""
    return next((vars(kind) for kind in type(module).__mro__ if name in vars(kind)), {})


def enclosed(cell: types.CellType) -> Any:
    """What a closure's cell holds; `NOTHING` if that is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING
