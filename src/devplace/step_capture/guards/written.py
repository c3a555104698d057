"""Objects that outlive a step and are written by it: restored, or refused as state."""

from __future__ import annotations

import dis
import functools
import gc
import random
import sys
import types
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_not, ne
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from devplace.errors import CaptureError
from devplace.step_capture.guards.code_names import LOADS, WRITERS, is_users, num_arguments
from devplace.step_capture.guards.host_state import global_generators
from devplace.step_capture.guards.values import (
    NOTHING,
    differs,
    is_generator,
    is_plain,
    kept,
    leaves,
)
from devplace.step_capture.sources import CONTAINERS, copied, restore

_BY_COMPUTED_NAME = ("getattr", "__dict__", "vars", "__getattribute__")
CACHE = type(functools.lru_cache(lambda: None))
_MODULE_OWN = frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))
_NO_OBJECTS = (torch.nn.Module, type, types.ModuleType)

Executed = Mapping[types.CodeType, Iterable[int]]


@dataclass(frozen=True)
class _Saved:
    """A container, or the attributes of an object, and a copy of it.

    Attributes:
        name: Of the container, or of the object.
        word: By which functions read the container; empty for attributes, which have their own.
        kind: Class of the object, if that is known.
        held: The container itself; None for classes and modules, whose names are set one by one.
        old: As it was.
        owner: The container or object itself.
    """

    name: str
    word: str
    kind: type | None
    held: Any
    old: Any
    owner: Any

    @property
    def container(self) -> Any:
        """What is written to, as it is now."""
        return self.held if self.held is not None else dict(vars(self.owner))

    def put_back(self) -> None:
        """Give it the entries it had."""
        if self.held is not None:
            restore(self.held, self.old)
            return
        for key in self.changes().keys() | self.old.keys() - vars(self.owner).keys():
            if key.startswith("__"):
                continue  # Python's own
            if key in self.old:
                setattr(self.owner, key, self.old[key])
            else:
                delattr(self.owner, key)

    def changes(self) -> dict[Any, Any]:
        """Entries that are other ones now, by key or place."""
        now, old = self.container, self.old
        if isinstance(now, set):
            return {each: each for each in now - old}
        if isinstance(now, dict):
            return {k: v for k, v in now.items() if k not in old or old[k] is not v}
        is_other = ne if isinstance(now, (array, bytearray)) else is_not
        pairs = enumerate(now)
        return {k: v for k, v in pairs if k >= len(old) or is_other(old[k], v)}


class Outliving:
    """Objects and containers that a step may write, as they were before it.

    Attributes:
        names: `id` -> name of what is known.
        first: What the first of two runs has changed: place and key of an entry -> its value.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.first: dict[tuple[int, Any], Any] = {}
        self._saved: list[_Saved] = []
        self._of: dict[int, _Saved] = {}  # by id of the owner
        self._generators: list[tuple[str, Any, Any]] = []
        self._caches: list[tuple[Any, int]] = []
        for name, generator in global_generators():
            self.meet(name, generator)

    def meet(self, name: str, value: Any) -> None:
        """Functions may write to a value, or draw from it: keep how it is, if it is new."""
        if is_generator(value):
            self._generators.append((name, value, _state(value)))
        elif isinstance(value, CACHE):
            self._caches.append((value, value.cache_info().misses))
        elif isinstance(value, CONTAINERS):
            self._save(name, name.rpartition(".")[2], None, value, value)
        elif isinstance(value, type):
            self._meet_class(value)
        elif isinstance(value, types.ModuleType) and is_users(value.__dict__.get("__file__") or ""):
            self._save(name, "", None, None, value)
        elif _is_users_object(value):
            self._save(name, "", _kind(value), vars(value), value)
            self._meet_class(type(value))

    def meet_module(self, name: str, module: torch.nn.Module) -> None:
        """As `meet`, with the containers that a module holds."""
        held = vars(module)
        self._save(name or "the model", "", type(module), held, module)
        self._meet_class(type(module))
        for key, value in held.items():
            if isinstance(value, CONTAINERS) and id(value) not in self._of:
                self._save(f"{name}.{key}" if name else key, key, type(module), value, value)

    def _meet_class(self, kind: type) -> None:
        """A class of the user's, and those it is derived from."""
        for each in kind.__mro__:
            if id(each) not in self._of and is_users(_file_of(each)):
                self._save(each.__name__, "", each, None, each)

    def _save(self, name: str, word: str, kind: type | None, held: Any, owner: Any) -> None:
        container = vars(owner) if held is None else held
        saved = _Saved(name, word, kind, held, copied(container), owner)
        self._of[id(owner)] = saved
        self._saved.append(saved)
        entries = container.items() if isinstance(container, dict) else enumerate(container)
        for key, part in entries:
            if isinstance(part, torch.Tensor):
                place = f"{name}[{key!r}]" if word else f"{name}.{key}".removeprefix("the model.")
                self.names.setdefault(id(part), place)

    def before(self, owner: Any, key: Any, now: Any) -> Any:
        """An attribute or item before the step, as far as it was kept then; else as it is now."""
        saved = self._of.get(id(owner))
        own = saved is not None and isinstance(saved.container, dict)
        if saved is None or not own or (key not in saved.container and key not in saved.old):
            return now
        return saved.old.get(key, NOTHING)

    def put_back(self) -> None:
        """Give back what was there, and forget what functions have cached since."""
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for saved in reversed(self._saved):
            saved.put_back()
        for _, generator, state in self._generators:
            _put_state(generator, state)

    def drawn_from(self) -> str | None:
        """Name of a generator of NumPy's or Python's that has drawn; None if none has."""
        changed = (n for n, each, state in self._generators if repr(_state(each)) != repr(state))
        return next(changed, None)

    def note(self) -> None:
        """The first of two runs has been."""
        self.first = {slot: kept(value) for slot, value in self._changes().items()}

    def words(self) -> set[str]:
        """By which functions read what the first run has changed."""
        return {self._saved[k].word or str(key) for k, key in self.first}

    def _changes(self) -> dict[tuple[int, Any], Any]:
        return {
            (k, key): value
            for k, saved in enumerate(self._saved)
            for key, value in saved.changes().items()
            if (saved.word or key) not in _MODULE_OWN
        }

    def is_known(self, stays: Callable[[Any], bool]) -> bool:
        """Whether all that the first run has changed is known to be there after the step."""
        return all(stays(self._saved[k].owner) for k, _ in self.first)

    def written(self) -> Iterator[Written]:
        """What the first run has changed, with its values after each run."""
        now = self._changes()
        for (k, key), value in self.first.items():
            saved = self._saved[k]
            name = saved.name if saved.word else f"{key!r} of {saved.name}"
            word = saved.word or str(key)
            yield Written(name, word, saved.kind, value, now.get((k, key), value), saved.owner)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                name = cache.__wrapped__.__name__
                held = [each for part in gc.get_referents(cache) for each in leaves(part) or ()]
                yield Written(f"what {name}() keeps", name, None, held, held, cache)
        for (k, key), value in now.items():
            saved = self._saved[k]
            if saved.word and (k, key) not in self.first and is_plain(value):  # it grows
                yield Written(saved.name, saved.word, saved.kind, NOTHING, value, saved.owner)


class Written(NamedTuple):
    """Something that a step writes.

    Attributes:
        name: In a message.
        word: By which functions read it.
        kind: Class of which it is an attribute, if that is known.
        first, second: Its value after each of two runs.
        owner: What holds it.
    """

    name: str
    word: str
    kind: type | None
    first: Any
    second: Any
    owner: Any


def refuse_lost(
    written: Iterable[Written], executed: Executed, is_state: Callable[[torch.Tensor], bool]
) -> None:
    """Refuse what a step writes, and functions read where this step does not come.

    That is tensors which change from step to step, and values that each run changes again.
    In another mode, or when another method is called, they would be those of before.

    Args:
        written: What it writes of what is there after it.
        executed: Code of the user's that ran -> offsets of what ran.
        is_state: Whether a tensor changes from step to step.

    Raises:
        CaptureError: Names it and a line that reads it.
    """
    for each in written:
        found = [leaf for leaf in leaves(each.first) or () if isinstance(leaf, FakeTensor)]
        is_known = each.first is NOTHING or is_plain(each.first)
        is_counted = not found and is_known and differs(each.second, each.first)
        if not (is_counted or any(map(is_state, found))):
            continue
        line = _reader(each.word, each.kind, executed)
        if line:
            raise CaptureError(
                f"State that a step writes must be kept in buffers: {each.name} is written by the "
                f"step, which would lose it, and read at {line}, where this step does not "
                f"come. Keep it in a buffer (register_buffer) and write into that."
            )


def no_buffer(name: str) -> CaptureError:
    """Error for state that a step reads and writes elsewhere."""
    return CaptureError(
        f"State of a step must be kept in buffers of the model: {name!r} is not, but is read and "
        f"changed by the step. Use register_buffer and write into that, make the module that has "
        f"it a part of the model (model.extra = module), or pass it as an input tensor."
    )


def function_behind(found: Any) -> Any:
    """The function of a method, property or cache of a class; None if there is none."""
    for name in ("fget", "func", "__func__", "__wrapped__"):
        if not isinstance(found, types.FunctionType):
            found = getattr(found, name, found)
    return found if isinstance(found, types.FunctionType) else None


def _reader(word: str, kind: type | None, executed: Executed) -> str:
    """A line that reads a name and did not run; empty if there is none.

    An attribute is read by methods of its class, and by all code through other names than `self`.
    """
    bases = kind.__mro__ if kind is not None else ()
    of_kind = {base.__name__ for base in bases}
    codes = dict(executed)
    for base in bases:
        for each in vars(base).values():
            behind = getattr(function_behind(each), "__code__", None)
            if behind is not None and is_users(behind.co_filename):
                codes.setdefault(behind, ())
    kinds = ("co_names", "co_varnames", "co_freevars", "co_consts")
    is_named = any(word in getattr(code, each) for code in codes for each in kinds)
    words = (word,) if is_named else _BY_COMPUTED_NAME
    for code, offsets in codes.items():
        owner = code.co_qualname.rpartition(".")[0].rpartition(".")[2]
        is_other = kind is not None and owner not in {*of_kind, "", "<locals>"}
        if is_other and kind is not None and issubclass(kind, torch.nn.Module):
            continue  # other modules read such names of themselves
        is_given = kind is None and word in code.co_varnames[: num_arguments(code)]
        left_out = code.co_varnames[:1] if is_other else ()
        for each in words:
            line = _line_of(each, code, offsets, is_given, left_out)
            if line:
                return f"{code.co_filename.rpartition('/')[2]}:{line}"
    return ""


def _line_of(
    word: str,
    code: types.CodeType,
    offsets: Iterable[int],
    is_given: bool,
    left_out: Iterable[str],
) -> int:
    """The first line of code that reads a name and did not run; 0 if there is none.

    Args:
        word: The name.
        code: Where it is looked for.
        offsets: Of what ran.
        is_given: Whether it is an argument, too.
        left_out: Names of objects of which it may be an attribute.
    """
    steps = list(dis.get_instructions(code))
    line = code.co_firstlineno
    for k, step in enumerate(steps):
        line = step.starts_line if type(step.starts_line) is int else line
        asks = any("getattr" in _names(each) for each in steps[max(k - 4, 0) : k])
        is_read = step.opname in LOADS or (asks and step.opname == "LOAD_CONST")
        is_read |= is_given and step.opname.startswith("LOAD_FAST")
        if not is_read or word not in _names(step) or step.offset in offsets:
            continue
        if _names(steps[max(k - 1, 0)])[-1] in left_out:
            continue
        after = [*steps[k + 1 : k + 3], step, step]
        is_kind_asked = any(each.argval == "isinstance" for each in steps[max(k - 2, 0) : k])
        is_stored = after[1].opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
        if not is_kind_asked and not is_stored and after[0].argval not in WRITERS:
            return line
    return 0


def _names(step: dis.Instruction) -> tuple[Any, ...]:
    """What an instruction names; of two that are one, both."""
    return step.argval if isinstance(step.argval, tuple) and step.argval else (step.argval,)


def _is_users_object(value: Any) -> bool:
    """Whether a value has attributes that functions may write: no module, package or class."""
    if type(getattr(value, "__dict__", None)) is not dict or isinstance(value, _NO_OBJECTS):
        return False
    if isinstance(value, types.FunctionType):
        return is_users(value.__code__.co_filename)
    return type(value) is types.SimpleNamespace or is_users(_file_of(type(value)))


def _kind(value: Any) -> type | None:
    return None if isinstance(value, types.FunctionType) else type(value)


def _file_of(kind: type) -> str:
    """File of a class; `<>` if it has none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<>"


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
