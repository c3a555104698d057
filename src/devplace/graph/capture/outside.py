"""What a step reads beside its model: modules and plain variables that its functions name."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from devplace.graph.capture.reads import Variable, enclosed, is_plain, kept
from devplace.graph.capture.tags import is_user_file

_MOST_PARTS = 1000
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_ENCLOSED = ("LOAD_DEREF", "LOAD_CLASSDEREF")


@dataclass
class Outside:
    """What functions reach that is no part of the model.

    Attributes:
        modules: Name -> module.
        variables: Plain values.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)

    def tensors(self) -> dict[int, str]:
        """Tensors that the modules hold: `id` -> dotted name."""
        found: dict[int, str] = {}
        for name, module in self.modules.items():
            for held in (module._parameters, module._buffers, vars(module)):
                for key, value in held.items():
                    if isinstance(value, torch.Tensor):
                        found.setdefault(id(value), f"{name}.{key}")
        return found


def find_outside(model: torch.nn.Module, loss_fn: Any) -> Outside:
    """Follow the loss function, and the forward methods of the model's modules.

    Functions of the user's are followed through the variables they name, attributes of these, and
    the functions found there; those of installed packages are not. Plain attributes of modules are
    left to `Reads`.
    """
    walk = _Walk({id(module) for module in model.modules()})
    if loss_fn is not None:
        walk.visit("loss_fn", loss_fn)
    for module in model.modules():
        walk.forward_of(module)
    return walk.found


class _Walk:
    def __init__(self, inside: set[int]) -> None:
        self.found = Outside()
        self._seen: set[Any] = set(inside)
        self._kept: list[Any] = []  # what is made on the way, so that ids stay its own

    def visit(self, name: str, value: Any) -> None:
        """Take up a module; go on into functions and containers."""
        if id(value) in self._seen or isinstance(value, type):
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.nn.Module):
            self._module(name, value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(name, part)
        elif isinstance(value, types.MethodType):
            self._function(value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif type(value) in (tuple, list, dict) and len(value) <= _MOST_PARTS:
            for part in value.values() if isinstance(value, dict) else value:
                self.visit(name, part)
        elif isinstance(vars(type(value)).get("__call__"), types.FunctionType):
            self._function(vars(type(value))["__call__"], value)

    def _module(self, name: str, root: torch.nn.Module) -> None:
        for path, module in root.named_modules():
            self._seen.add(id(module))
            self.found.modules[f"{name}.{path}" if path else name] = module
            self.forward_of(module)

    def forward_of(self, module: torch.nn.Module) -> None:
        """Go into the forward method of a module's class."""
        self._function(getattr(type(module), "forward", None), module)

    def _function(self, function: Any, owner: Any = None) -> None:
        code = getattr(function, "__code__", None)
        if code is None or not _is_users(code.co_filename) or (id(code), id(owner)) in self._seen:
            return
        self._seen.add((id(code), id(owner)))
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        for root, path in _named(code):
            if root == "self" and owner is not None:
                self._follow("self", None, "", owner, path)
            elif root in cells:
                self._follow(root, cells[root], root, enclosed(cells[root]), path)
            elif root in function.__globals__:
                names = function.__globals__
                self._follow(root, names, root, names[root], path)

    def _follow(self, name: str, holder: Any, key: str, value: Any, path: list[str]) -> None:
        """The attributes named one after another, as far as they lie in plain dicts."""
        for part in path:
            names = getattr(value, "__dict__", None)
            if type(names) is not dict or _is_package(value):
                return
            if isinstance(value, torch.nn.Module) and part in names and is_plain(names[part]):
                return  # left to `Reads`
            if part not in names:
                method = getattr(type(value), part, None)
                if isinstance(method, types.FunctionType):
                    self._function(method, value)
                return
            name, holder, key, value = f"{name}.{part}", names, part, names[part]
        if is_plain(value) and holder is not None:
            self.found.variables.append(Variable(name, holder, key, kept(value)))
        else:
            self.visit(name, value)


def _is_package(value: Any) -> bool:
    is_module = isinstance(value, types.ModuleType)
    return is_module and not _is_users(getattr(value, "__file__", None) or "")


def _is_users(filename: str) -> bool:
    return bool(filename) and is_user_file(filename) and "-packages" not in filename


@functools.cache
def _named(code: types.CodeType) -> tuple[tuple[str, list[str]], ...]:
    return tuple(_find_named(code))


def _find_named(code: types.CodeType) -> Iterator[tuple[str, list[str]]]:
    """Variables from outside that code reads, each with the attributes read of it.

    The first argument counts as one under the name `self`.
    """
    first = code.co_varnames[0] if code.co_argcount else None
    current: tuple[str, list[str]] | None = None
    for step in dis.get_instructions(code):
        if step.opname in _ATTRIBUTE and current is not None:
            current[1].append(step.argval)
            continue
        if current is not None:
            yield current
            current = None
        last = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
        if step.opname.startswith("LOAD_FAST") and last == first is not None:
            current = ("self", [])
        elif step.opname in ("LOAD_GLOBAL", *_ENCLOSED):
            current = (step.argval, [])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = (found for found in _named(constant) if found[0] != "self")
            yield from inner
