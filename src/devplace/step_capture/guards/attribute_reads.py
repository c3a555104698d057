"""Plain values, functions, modules and free tensors that a step reads."""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import types
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from devplace.errors import CaptureError
from devplace.step_capture.guards.code_names import (
    EVERY,
    UNKNOWN,
    WHOLE,
    WRITERS,
    Names,
    Use,
    is_users,
    names_of,
)
from devplace.step_capture.guards.rechecked import (
    Place,
    attribute,
    enclosed,
    own_names,
    tried,
)
from devplace.step_capture.guards.values import (
    NOTHING,
    differs,
    holds_fakes,
    is_array,
    is_kept,
    is_list_or_dict,
    is_plain,
)
from devplace.step_capture.guards.written import CACHE, Outliving
from devplace.step_capture.sources import Slots

_MAX_PARTS = 1000
_SLOT = (types.MemberDescriptorType, types.GetSetDescriptorType)
_LEFT = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
_WRAPPED = (UserDict, UserList, WeakKeyDictionary, WeakValueDictionary, WeakSet)  # hold `data`
_CONTAINERS = (dict, list, tuple, set, frozenset)
_OF_MODULES = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
_MODULE_OWN = (frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))) - {"training"}
_WRITES = {Use("attribute", name) for name in WRITERS}
_NONE: frozenset[Use] = frozenset()


class Reads:
    """Follows the names in functions to the values they stand for.

    A function that names a variable or argument reads it, and of it the attributes and items that
    it names next. In functions of packages only modules are followed.

    Attributes:
        places: Where values are read, each once, in the order in which they are found.
        modules: Modules beside the model: name -> module.
        functions: Code -> functions of it that were met.
        stays: `id` of what is known to be there after the step.
        met: `id` of what this run has met.

    Args:
        model: The module.
        outliving: Gets all that is met.
        slots: Where the model's sources are; modules beside the model may hold some, too.
    """

    def __init__(
        self, model: torch.nn.Module, outliving: Outliving, slots: Slots | None = None
    ) -> None:
        self.places: list[Place] = []
        self._readers: dict[tuple[int, Any], dict[int, Names]] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self.functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self.stays: set[int] = set()
        self.met: set[Any] = set()
        self._outliving, self._slots = outliving, slots
        self._inside = {id(module): name for name, module in model.named_modules()}
        self._known: dict[int, Any] = {}  # so that ids stay their own
        self._seen: set[Any] = set()
        self._is_over = False
        for name, module in model.named_modules():
            self.stays.add(id(module))
            outliving.meet_module(name, module)

    def start_again(self) -> None:
        """The second run begins; what it alone reads was not there before the step."""
        self._is_over = True
        self.met, self._seen = set(), set()

    def let_go(self) -> None:
        """The second run is over: nothing more is met, and what steps make is let go."""
        self._known = {key: value for key, value in self._known.items() if key in self.stays}

    def readers_of(self, place: Place) -> Iterable[Names]:
        """Functions that read a place."""
        return self._readers[id(place.holder), place.key].values()

    def variables(
        self, names: Names, known: Mapping[str, Any], cells: Mapping[str, Iterable[Any]]
    ) -> None:
        """Take up what a function reads of globals, free variables and imported modules.

        Args:
            names: Of the function.
            known: Its globals.
            cells: Its free variables: name -> cells.
        """
        code = names.code
        for name in names.variables.union(code.co_freevars):
            if name in code.co_freevars:
                for cell in cells.get(name, ()):
                    self._take(Place(name, cell, name, enclosed(cell), "variable"), names, name)
            elif name in code.co_cellvars:
                continue
            elif name in known:
                self._take(Place(name, known, name, known[name]), names, name)
            elif name in sys.modules:
                self._go(Place(name, None, None, sys.modules[name]), names, name)
            elif name in names.late:
                self._take(Place(name, known, name, NOTHING), names, name)

    def argument(self, name: str, value: Any, names: Names, word: str | None = None) -> None:
        """Take up what a function reads of an argument, or of what another one gives it.

        Args:
            name: Of the argument, or of the other function.
            value: What is given.
            names: Of the function.
            word: By which it reads the value, if that is not the name.
        """
        word = name if word is None else word
        if isinstance(value, _LEFT) or not (names.is_users or isinstance(value, torch.nn.Module)):
            return
        if isinstance(value, torch.nn.Module) and "_modules" not in vars(value):
            return  # it is being made
        stays = id(value) in self.stays
        name_of = self._outliving.names.get(id(value), name)
        at = Place(name_of, value, None, value, "argument", outlives=stays)
        uses = names.uses.get(word, _NONE)
        if not stays and (is_list_or_dict(value) or is_array(value)) and _is_read(value, uses):
            self.keep(at, names)
        self._go(at, names, word)

    def _take(self, place: Place, names: Names, word: Any) -> None:
        """Keep a value if it is read, and go on into it."""
        value = place.value
        if _is_read(value, names.uses.get(word, _NONE)):
            self.keep(place, names)
        if value is not NOTHING:
            self._go(place, names, word)

    def keep(self, place: Place, names: Names | None = None) -> None:
        """Note a place, with its value before the step."""
        value = place.value
        if value is not NOTHING and (not is_kept(value) or holds_fakes(value)):
            return
        key = (id(place.holder), place.key)
        self.met.add(key)
        if key not in self._readers:
            if self._is_over:
                return
            self._readers[key] = {}
            self._known.setdefault(id(place.holder), place.holder)
            before = self._outliving.before(place.holder, place.key, value)
            if not differs(value, before):  # else it is written before it is read
                self.places.append(place.with_copy())
        if names is not None:
            self._readers[key][id(names)] = names

    def _go(self, at: Place, names: Names, word: Any) -> None:
        """Take up what a function reads of a value."""
        value, uses = at.value, names.uses.get(word, _NONE)
        mark = (id(names), word, id(value))
        if mark in self._seen:
            return
        self._seen.add(mark)
        if isinstance(value, torch.Tensor) or not isinstance(value, _LEFT):
            self.meet(at.name, value, at.outlives)
        if not (names.is_users or isinstance(value, torch.nn.Module)):
            return
        if isinstance(value, _LEFT) or is_package(value):
            return
        if isinstance(value, contextvars.ContextVar):
            key = at.name.rpartition(".")[2]
            self._take(
                Place(f"{at.name}.get()", value, key, value.get(NOTHING), "context"), names, UNKNOWN
            )
        if WHOLE in uses:
            uses |= names.uses.get(UNKNOWN, _NONE)
        indexed = [key for kind, key in uses if kind == "item" and not isinstance(value, Mapping)]
        for part in _parts(value):
            for each in (word, *indexed):
                self._go(Place(at.name, None, None, part, outlives=at.outlives), names, each)
        is_every = EVERY in uses and type(getattr(value, "__dict__", None)) is dict
        if is_every and not isinstance(value, (types.ModuleType, type, types.FunctionType)):
            for key in tuple(vars(value)):
                self._attribute(at, key, names, word)
        for kind, key in uses:
            if kind == "item" and isinstance(value, Mapping):
                self._take(at.item(key, tried(value.get, key)), names, key)
            elif kind in ("attribute", "maybe"):
                self._attribute(at, key, names, key, kind == "maybe")

    def _attribute(
        self, at: Place, key: Any, names: Names, word: Any, may_lack: bool = False
    ) -> None:
        """Take up an attribute, unless it is computed: then its function is, when it is called."""
        value = at.value
        if isinstance(value, torch.nn.Module):
            if key not in _MODULE_OWN:
                self._of_module(at, key, names, word, may_lack)
            return
        is_field = isinstance(value, tuple) and key in getattr(type(value), "_fields", ())
        if is_list_or_dict(value) or (isinstance(value, tuple) and not is_field):
            return
        if key == "__class__":
            self._go(Place(type(value).__name__, None, None, type(value)), names, key)
            return
        own = getattr(value, "__dict__", None)
        if type(own) is dict and key in own:
            self._take(at.attribute(key, own[key], own), names, word)
            return
        kind: Any = value if isinstance(value, type) else type(value)
        found = inspect.getattr_static(kind, key, NOTHING)
        if found is NOTHING:
            found = _by_rule(value, key)
            if (found is NOTHING and not may_lack) or not _is_simple(found):
                return
        elif is_field or isinstance(found, _SLOT):
            found = tried(getattr, value, key)
            if not is_field and not _is_simple(found):
                return
        elif hasattr(found, "__get__"):
            self._meet_cached(found)
            return
        self._take(at.attribute(key, found), names, word)

    def _of_module(self, at: Place, key: Any, names: Names, word: Any, may_lack: bool) -> None:
        module: Any = at.value
        found, path = attribute(module, key), self._inside.get(id(module))
        own = next((held for held in own_names(module) if key in held), None)
        if own is None and hasattr(found, "__get__"):
            self._meet_cached(found)
        elif path is not None and isinstance(found, torch.nn.Module):
            self._go(at.attribute(key, found), names, word)
        elif found is not NOTHING or (may_lack and tried(getattr, module, key) is NOTHING):
            self._take(at.attribute(key, found, own, path), names, word)

    # ---- what is met

    def meet(self, name: str, value: Any, stays: bool) -> None:
        """Name a value that functions can reach.

        Raises:
            CaptureError: It is an iterator that is there before the step.
        """
        self.met.add(id(value))
        is_new = id(value) not in self._known
        if not is_new and (not stays or id(value) in self.stays):
            return
        self._known[id(value)] = value
        if isinstance(value, torch.nn.Module):
            if is_new and id(value) not in self._inside:
                self._meet_beside(name, value, stays)
        elif is_new:
            self._outliving.names.setdefault(id(value), name)
            self._outliving.meet(name, value)
        if stays:
            self.stays.add(id(value))
        if is_new and stays and _is_iterator(value):
            raise _draws_from_iterator(name, type(value))
        self._meet_parts(name, value, stays)

    def _meet_parts(self, name: str, value: Any, stays: bool) -> None:
        """Functions in and behind a value."""
        if isinstance(value, types.FunctionType):
            self.functions.setdefault(value.__code__, []).append(value)
        elif isinstance(value, types.MethodType):
            self.meet("self", value.__self__, stays)
            self.meet(name, value.__func__, stays)
        elif isinstance(value, _WRAPPED):
            self.meet(name, vars(value)["data"], stays)
        elif isinstance(value, ChainMap):
            for part in value.maps:
                self.meet(name, part, stays)
        elif isinstance(value, CACHE):
            self._without_call(value.__wrapped__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args):
                self.meet(name, part, stays)
            for key, part in value.keywords.items():
                self.keep(Place(key, value.keywords, key, part, outlives=stays))
                self.meet(key, part, stays)

    def _meet_cached(self, found: Any) -> None:
        if isinstance(found, CACHE):
            self.meet(found.__wrapped__.__name__, found, True)

    def _without_call(self, function: Any) -> None:
        """Take up what a function names that may not be called, as its results are cached."""
        code = getattr(function, "__code__", None)
        if code is None or not is_users(code.co_filename) or ("cached", id(code)) in self._seen:
            return
        self._seen.add(("cached", id(code)))
        names = names_of(code)
        free = zip(code.co_freevars, function.__closure__ or (), strict=True)
        self.variables(names, function.__globals__, {name: [cell] for name, cell in free})
        for name in names.variables:
            self._without_call(function.__globals__.get(name))

    def _meet_beside(self, name: str, root: torch.nn.Module, stays: bool) -> None:
        """A module beside the model."""
        for path, module in root.named_modules():
            if id(module) in self._inside:
                continue
            full = f"{name}.{path}" if path else name
            self._known[id(module)] = module
            self._outliving.names[id(module)] = full
            for held in (module._parameters, module._buffers):
                for key, value in held.items():
                    self._outliving.names.setdefault(id(value), f"{full}.{key}")
            self._outliving.meet_module(full, module)
            self.met.add(id(module))
            if stays:
                self.stays.add(id(module))
            self.modules[full] = module
            if self._slots is not None:
                self._slots.take_in(module)


def is_package(value: Any) -> bool:
    """Whether a value is a module of Python that is not the user's."""
    is_module = isinstance(value, types.ModuleType)
    return is_module and not is_users(getattr(value, "__file__", None) or "")


def _is_read(value: Any, uses: frozenset[Use]) -> bool:
    """Whether a value itself is read, and not only parts of it, or written."""
    if isinstance(value, tuple):
        fields = getattr(type(value), "_fields", ())
        return not fields or any(u.kind != "attribute" or u.key not in fields for u in uses)
    if isinstance(value, dict):
        uses = frozenset(use for use in uses if use.kind != "item")
    return not is_list_or_dict(value) or bool(uses - _WRITES)


def _parts(value: Any) -> list[Any]:
    """Parts of a container that may be read in turn."""
    if isinstance(value, _OF_MODULES):
        return list(value._modules.values())
    if not isinstance(value, _CONTAINERS):
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [part for part in tuple(parts)[:_MAX_PARTS] if not isinstance(part, _LEFT)]


def _by_rule(value: Any, key: str) -> Any:
    """An attribute that an object's class computes; `NOTHING` if it has no rule."""
    rules: Any = type(value)
    own = rules.__getattribute__ is not object.__getattribute__
    is_ruled = own or hasattr(rules, "__getattr__")
    return tried(getattr, value, key) if is_ruled and not isinstance(value, type) else NOTHING


def _is_simple(value: Any) -> bool:
    return value is NOTHING or is_plain(value) or isinstance(value, (*_CONTAINERS, torch.Tensor))


def _is_iterator(value: Any) -> bool:
    kind = type(value)
    is_known = kind.__module__.partition(".")[0] in ("builtins", "itertools", "torch")
    return is_known and hasattr(kind, "__next__")


def _draws_from_iterator(name: str, kind: type) -> CaptureError:
    return CaptureError(
        f"A step must not draw from an iterator: {name!r} is a {kind.__name__}, whose next item "
        f"would be taken at capture and never again. Take the item outside of the step and pass "
        f"it as an input tensor."
    )
