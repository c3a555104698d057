"""What a step reads beside its model: modules and variables that its functions name."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from devplace.errors import CaptureError
from devplace.graph.capture.lookups import (
    CACHE,
    attribute_of,
    defaults_of,
    function_behind,
    is_package,
    is_read_whole,
    is_users,
    looked_up,
)
from devplace.graph.capture.names import Every, Item, Part, Perhaps, named
from devplace.graph.capture.reads import Variable, enclosed
from devplace.graph.capture.values import (
    NOTHING,
    is_function,
    is_kept,
    is_plain,
    kept,
)

_MOST_PARTS = 1000
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "gt")
_CALLED_BY_PYTHON = (
    *("__call__", "__float__", "__int__", "__bool__", "__index__", "__neg__", "__abs__"),
    *("__len__", "__iter__", "__next__", "__getitem__", "__contains__", "__enter__"),
    *(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")),
)


@dataclass
class Outside:
    """What functions reach that is no part of the model.

    Attributes:
        modules: Name -> module.
        variables: Values: plain ones, and tensors, modules and functions by which they compute.
        caches: Functions under `functools.lru_cache`.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)

    def tensors(self) -> dict[int, str]:
        """Tensors that the modules hold: `id` -> dotted name."""
        found: dict[int, str] = {}
        for name, module in self.modules.items():
            for held in (module._parameters, module._buffers, vars(module)):
                for key, value in held.items():
                    if isinstance(value, torch.Tensor):
                        found.setdefault(id(value), f"{name}.{key}")
        return found

    def names(self) -> dict[int, str]:
        """As `tensors`, with those that are variables."""
        held = {id(v.value): v.name for v in self.variables if isinstance(v.value, torch.Tensor)}
        return held | self.tensors()


def find_outside(model: torch.nn.Module, loss_fn: Any) -> Outside:
    """Follow the loss function, and the forward methods of the model's modules.

    Functions of the user's are followed through the variables they name, attributes and items of
    these, and the functions found there; those of installed packages are not. Plain attributes of
    modules are left to `Reads`.
    """
    walk = _Walk({id(module) for module in model.modules()})
    if loss_fn is not None:
        walk.visit("loss_fn", loss_fn)
    for module in model.modules():
        walk.forward_of(module)
    walk.follow_modules(model)
    walk.follow_passed()
    return walk.found


class _Walk:
    def __init__(self, inside: set[int]) -> None:
        self.found = Outside()
        self._inside = inside
        self._seen: set[Any] = set(inside)
        self._places: set[tuple[int, Any]] = set()
        self._passed: list[tuple[str, Any]] = []
        self._of_arguments: list[list[Part]] = []
        self._kept: list[Any] = []  # what is made on the way, so that ids stay its own

    def visit(self, name: str, value: Any) -> None:
        """Take up a module; go on into functions and containers."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, type):
            if issubclass(value, torch.autograd.Function):
                self._function(vars(value).get("forward"))
                self._function(vars(value).get("backward"))
        elif isinstance(value, torch.nn.Module):
            self._module(name, value)
        elif isinstance(value, functools.partial):
            self._partial(name, value)
        elif isinstance(value, types.MethodType):
            self._function(value.__func__, value.__self__)
        elif isinstance(value, CACHE):
            self.found.caches.append(value)
            self.visit(name, value.__wrapped__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif type(value) in (tuple, list, dict) and len(value) <= _MOST_PARTS:
            for part in value.values() if isinstance(value, dict) else value:
                self.visit(name, part)
        elif not is_package(value):
            self._object(name, value)

    def _object(self, name: str, value: Any) -> None:
        """Follow what Python calls for `value(...)`, `float(value)`, `value * 2` and the like.

        Raises:
            CaptureError: It is an iterator, which would give its next item at capture only.
        """
        kind = type(value)
        is_known = kind.__module__.partition(".")[0] in ("builtins", "itertools", "torch")
        if is_known and hasattr(kind, "__next__"):
            raise _draws_from_iterator(name, kind)
        functions = {n: inspect.getattr_static(kind, n, None) for n in _CALLED_BY_PYTHON}
        functions = {n: f for n, f in functions.items() if isinstance(f, types.FunctionType)}
        for function in functions.values():
            self._function(function, value)
        if type(getattr(value, "__dict__", None)) is dict and "__call__" not in functions:
            self._passed.append((name, value))

    def _read_unknown(self, path: list[Part]) -> None:
        if path and path not in self._of_arguments:
            self._of_arguments.append(path)

    def follow_modules(self, model: torch.nn.Module) -> None:
        """Modules are passed on, too: `helper(self, x)` may read `self.config.factor`."""
        paths = [path for path in self._of_arguments if len(path) > 1]
        for name, module in model.named_modules():
            for path in paths:
                if path[0] in vars(module):
                    self._follow(name or "model", None, "", module, path)

    def follow_passed(self) -> None:
        """Objects that are passed on are read as functions read their arguments.

        Which argument an object becomes is not known: what it has of all that they read counts.
        """
        for name, value in tuple(self._passed):  # what these hold is not gone into
            for path in tuple(self._of_arguments):
                self._follow(name, None, "", value, path)

    def _module(self, name: str, root: torch.nn.Module) -> None:
        for path, module in root.named_modules():
            self._seen.add(id(module))
            self.found.modules[f"{name}.{path}" if path else name] = module
            self.forward_of(module)

    def _partial(self, name: str, value: functools.partial[Any]) -> None:
        for part in (value.func, *value.args, *value.keywords.values()):
            self.visit(name, part)
        function = value.func
        if isinstance(function, types.FunctionType):
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            given = dict(zip(names, value.args, strict=False))
            self._kept.append(given)
            bound = {key: (given, key) for key in given}
            self._function(function, bound=bound | {k: (value.keywords, k) for k in value.keywords})

    def forward_of(self, module: torch.nn.Module) -> None:
        """Go into the forward method of a module's class."""
        self._function(getattr(type(module), "forward", None), module)

    def _function(
        self,
        function: Any,
        owner: Any = None,
        bound: Mapping[str, tuple[Mapping[str, Any], str]] | None = None,
    ) -> None:
        """Follow what a function names.

        Args:
            function: Of the user's; others are left.
            owner: Value of its first argument, if that is known.
            bound: Other arguments of known values: name -> what holds it, and its key there.
        """
        function = getattr(function, "__func__", function)  # of a static method, say
        code = getattr(function, "__code__", None)
        if code is None or not is_users(code.co_filename):
            return
        mark = (id(code), id(owner), *(id(holder) for holder, _ in (bound or {}).values()))
        if mark in self._seen:
            return
        self._seen.add(mark)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        arguments = defaults_of(function) | dict(bound or {})
        for kind, root, path in named(code):
            if kind == "argument" and owner is not None and root == code.co_varnames[0]:
                self._follow("self", None, "", owner, path)
            elif kind == "argument" and root in arguments:
                holder, key = arguments[root]
                self._follow(root, holder, key, holder[key], path)
            elif kind in ("argument", "local"):
                self._read_unknown(path)
            elif kind == "import" and root in sys.modules:
                self._follow(root, None, "", sys.modules[root], path)
            elif kind == "variable" and root in cells:
                self._follow(root, cells[root], root, enclosed(cells[root]), path)
            elif kind == "variable" and root in function.__globals__:
                names = function.__globals__
                self._follow(root, names, root, names[root], path)

    def _follow(self, name: str, holder: Any, key: Any, value: Any, path: list[Part]) -> None:
        """The attributes and items named one after another, as far as they can be looked up."""
        at = Variable(name, holder, key, value)
        for index, part in enumerate(path):
            if isinstance(part, Every):
                self._every(at)
                break
            if is_read_whole(at.value, part):
                break
            if isinstance(part, Item) and not isinstance(at.value, Mapping):
                self._function(getattr(type(at.value), "__getitem__", None), at.value)
                self._read_unknown(path[index + 1 :])
                break  # a list, say, which is kept as a whole
            after = self._item(at, part) if isinstance(part, Item) else self._attribute(at, part)
            if after is None:
                return
            at = after
        is_absent = at.value is NOTHING and bool(path) and not isinstance(path[-1], str)
        if at.holder is not None and (is_absent or is_kept(at.value)):
            self._keep(replace(at, value=kept(at.value)))
        if not is_plain(at.value):
            self.visit(at.name, at.value)

    def _every(self, at: Variable) -> None:
        """All attributes of an object, and of objects in it; modules are left to `Reads`."""
        value, names = at.value, getattr(at.value, "__dict__", None)
        is_left = isinstance(value, (types.ModuleType, torch.nn.Module, types.FunctionType, type))
        if type(names) is not dict or is_left or ("every", id(value)) in self._seen:
            return
        self._seen.add(("every", id(value)))
        for key, found in names.items():
            part = Variable(f"{at.name}.{key}", names, key, kept(found), above=at)
            if is_kept(found):
                self._keep(part)
            else:
                self._every(part)

    def _item(self, at: Variable, part: Item) -> Variable:
        found = looked_up(at.value, part)
        return Variable(f"{at.name}[{part.key!r}]", at.value, part.key, found, above=at)

    def _attribute(self, at: Variable, part: str | Perhaps) -> Variable | None:
        """An attribute of what was found so far; None if there is no more to be found."""
        value, key = at.value, part.key if isinstance(part, Perhaps) else part
        if value is NOTHING or is_package(value) or self._is_left(at.name, value, key):
            return None
        name, names = f"{at.name}.{key}", getattr(value, "__dict__", None)
        if type(names) is dict:
            is_missing = isinstance(part, Perhaps) and attribute_of(value, key) is NOTHING
            if is_missing or key in names:
                return Variable(name, names, key, names.get(key, NOTHING), above=at)
        found = self._computed(at.name, value, key)
        if found is NOTHING:
            return None
        return Variable(name, value, key, found, True, above=at)

    def _is_left(self, name: str, value: Any, part: str) -> bool:
        """Whether an attribute is one that `Reads` sees."""
        if not isinstance(value, torch.nn.Module) or part not in vars(value):
            return False
        found = vars(value)[part]
        if is_function(found):
            self._function(found)
        elif not is_plain(found):
            return False
        if id(value) not in self._inside and value not in self.found.modules.values():
            self.found.modules[name] = value  # one whose method is the loss function, say
        return True

    def _computed(self, name: str, value: Any, part: str) -> Any:
        """An attribute that is not in the dict of an object; methods and properties are followed.

        Returns:
            It, or `NOTHING` if it has been followed or is not to be kept.
        """
        kind: Any = value if isinstance(value, type) else type(value)
        found = inspect.getattr_static(kind, part, NOTHING)
        if isinstance(found, CACHE):
            self.found.caches.append(found)
        if isinstance(value, type) and part == "apply":
            self.visit(name, value)  # a function with a gradient of its own
        function = function_behind(found)
        if function is not None:
            is_static = isinstance(found, staticmethod)
            owner = kind if isinstance(found, classmethod) else value
            self._function(function, None if is_static or owner is value is kind else owner)
            return NOTHING
        if found is NOTHING:
            rules: Any = type(value)
            own = rules.__getattribute__ is not object.__getattribute__
            has_rule = own or hasattr(rules, "__getattr__")
            is_torchs = isinstance(value, (torch.nn.Module, torch.Tensor))
            return attribute_of(value, part) if has_rule and not is_torchs else NOTHING
        is_field = isinstance(value, tuple) and part in getattr(kind, "_fields", ())
        is_slot = is_field or isinstance(found, types.MemberDescriptorType)
        return attribute_of(value, part) if is_slot or not hasattr(found, "__get__") else NOTHING

    def _keep(self, variable: Variable) -> None:
        """Each place once, so that what a trace changes there is seen and put back."""
        place = (id(variable.holder), variable.key)
        if place not in self._places:
            self._places.add(place)
            self.found.variables.append(variable)
            self._kept.append(variable.holder)


def _draws_from_iterator(name: str, kind: type) -> CaptureError:
    return CaptureError(
        f"A step must not draw from an iterator: {name!r} is a {kind.__name__}, whose next item "
        f"would be taken at capture and never again. Take the item outside of the step and pass "
        f"it as an input tensor."
    )
