"""Which values a step reads of modules and variables while it is traced, and which it changes."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from devplace.errors import CaptureError
from devplace.graph.capture.values import (
    NOTHING,
    differs,
    holds_fakes,
    is_array,
    is_kept,
    is_traced,
    kept,
)

_MODULE_OWN = (frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))) - {"training"}


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
        """Give it another value; a list, queue, set, dict or array stays the same object."""
        now = self.present()
        if type(now) is type(value) and isinstance(now, (list, deque)):
            now.clear()
            now.extend(kept(value))
        elif type(now) is type(value) and isinstance(now, (dict, set)):
            now.clear()
            now.update(kept(value))
        elif is_array(now) and is_array(value) and now.shape == value.shape != ():
            now[...] = value
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
        values: Name of the module -> attribute -> value, of what is read before it is written;
            `NOTHING` for one that was asked for and missing.
        changed: Those that end with another value, and that value; they are not in `values`.

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
        names = ("__getattribute__", "__getattr__", "__setattr__")
        was = {n: vars(own).get(n, NOTHING) for n in names}
        own.__getattribute__ = self._getter(own.__getattribute__)
        own.__getattr__ = self._missing(own.__getattr__)
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
            for key, value in values.items():
                holder = _holder(self._modules[name], key)
                found.append(Variable(f"{key} of {name}", holder, key, value))
        return found

    def _getter(self, get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def read(module: Any, name: str) -> Any:
            value = get(module, name)
            if isinstance(value, types.MethodType) and name not in vars(module):
                return value
            known = self._to_fill(module, name)
            if known is not None and is_kept(value) and not holds_fakes(value):
                known[name] = kept(value)
            return value

        return read

    def _missing(self, get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        """What is asked for what is no plain attribute: parameters, buffers, parts, and others."""

        def read(module: Any, name: str) -> Any:
            known = self._to_fill(module, name)
            try:
                value = get(module, name)
            except AttributeError:
                if known is not None:
                    known[name] = NOTHING
                raise
            is_outside = isinstance(value, torch.Tensor) and not is_traced(value)
            if known is not None and (value is None or is_outside):
                known[name] = value
            return value

        return read

    def _to_fill(self, module: Any, name: str) -> dict[str, Any] | None:
        """Where a read is noted, if it is the first one and comes before any write."""
        known = self._found.get(id(module)) if name not in _MODULE_OWN else None
        is_new = known is not None and name not in known
        return known if is_new and (id(module), name) not in self._written else None

    def _setter(self, put: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        found, written = self._found, self._written

        def write(module: Any, name: str, value: Any) -> None:
            if id(module) in found:
                written.add((id(module), name))
            put(module, name, value)

        return write

    def _compare(self) -> None:
        """Keep attributes that are as they were; note the others.

        Raises:
            CaptureError: A module was made while the step ran.
        """
        for name, found in self.values.items():
            module = self._modules[name]
            for key, value in list(found.items()):
                now = attribute(module, key)
                is_computed = now is NOTHING and (value is not NOTHING or _has(module, key))
                if is_computed or (now is not NOTHING and not is_kept(now)):
                    del found[key]  # of a property, or by an object's own rule
                elif differs(now, value):
                    del found[key]
                    where = f"{key!r} of module {name!r}" if name else f"{key!r} of the model"
                    if isinstance(now, torch.nn.Module):
                        raise _made_inside(where)
                    variable = Variable(where, _own(module, key), key, value)
                    self.changed.append((variable, kept(now)))


def _made_inside(where: str) -> CaptureError:
    return CaptureError(
        f"Modules must be there before the step: {where} is made while it runs. Make it in "
        f"__init__, or call the model once before the optimizer is made."
    )


def _has(module: torch.nn.Module, name: str) -> bool:
    try:
        return hasattr(module, name)
    except Exception:  # by a rule of the user's
        return True


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Attribute of a module itself or a value of its class; nothing is computed."""
    return _holder(module, name).get(name, NOTHING)


def own_names(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts that hold what a module itself has."""
    return vars(module), module._parameters, module._buffers, module._modules


def _own(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """That of a module's dicts which holds an attribute, or is to hold it."""
    return next((names for names in own_names(module) if name in names), vars(module))


def _holder(module: torch.nn.Module, name: str) -> Mapping[str, Any]:
    """As `_own`, or the names of the class that has the attribute."""
    own = _own(module, name)
    kinds: Any = () if name in own else map(vars, type(module).__mro__)
    return next((names for names in kinds if name in names), own)


def enclosed(cell: types.CellType) -> Any:
    """What a closure's cell holds; `NOTHING` if that is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING
