"""Which plain attributes of modules a step reads while it is traced: a captured step keeps them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (int, float, bool, str, bytes, complex, type(None))
_MOST_PARTS = 64
_MODULE_OWN = (frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))) - {"training"}
NOTHING = object()
"""Stands for no value."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a short tuple, list or dict of such."""
    if isinstance(value, _PLAIN):
        return True
    if type(value) in (tuple, list) and len(value) <= _MOST_PARTS:
        return all(is_plain(part) for part in value)
    if type(value) is dict and len(value) <= _MOST_PARTS:
        return all(is_plain(part) for part in value.values())
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def kept(value: Any) -> Any:
    """A plain value that stays as it is, whatever is done to lists and dicts in it."""
    return deepcopy(value) if type(value) in (tuple, list, dict) else value


def differs(now: Any, value: Any) -> bool:
    """Whether a plain value is another one now; a NaN is itself."""
    if now is value:
        return False
    return (type(now) is not type(value) and not is_plain(now)) or bool(now != value)


@dataclass(frozen=True)
class Variable:
    """A plain global, enclosed variable or attribute that a function reads.

    Attributes:
        name: As the user wrote it, such as `args.beta`.
        holder: Cell, or dict that holds it.
        key: Its key in the dict.
        value: When it was found.
    """

    name: str
    holder: Any
    key: str
    value: Any

    def present(self) -> Any:
        """Its value now; `NOTHING` if it is gone."""
        if isinstance(self.holder, types.CellType):
            return enclosed(self.holder)
        return self.holder.get(self.key, NOTHING)

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
            if is_plain(value):
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
                if now is NOTHING or not is_plain(now):
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
