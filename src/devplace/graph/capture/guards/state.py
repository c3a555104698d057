"""What outlives a step: it is put back after a capture, and is no place for a step's state."""

from __future__ import annotations

import contextlib
import dis
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from devplace.errors import CaptureError
from devplace.graph.capture.guards.host import global_generators
from devplace.graph.capture.lookups import WRITERS, function_behind, is_users
from devplace.graph.capture.outside import Outside
from devplace.graph.capture.sources import CONTAINERS, restore
from devplace.graph.capture.values import differs, is_generator, is_plain, kept, leaves

_READS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_NO_OBJECTS = (torch.nn.Module, type, types.ModuleType, types.FunctionType)
_STORES = {"STORE_SUBSCR", "DELETE_SUBSCR"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODULE_OWN = frozenset(dir(torch.nn.Module)) | frozenset(vars(torch.nn.Module()))

Executed = dict[types.CodeType, set[int]]
Slot = tuple[int, Any]
Meet = Callable[[str, Any, bool], None]


@dataclass(frozen=True)
class _Saved:
    """A container, or the attributes of an object, and a copy of it.

    Attributes:
        name: Of the container, or of the object.
        word: By which functions read the container; empty for attributes, which have their own.
        kind: Class of the object, if that is known.
        outlives: Whether it is known to be there after the step.
    """

    name: str
    word: str
    kind: type | None
    container: Any
    old: Any
    outlives: bool

    def changes(self) -> dict[Any, Any]:
        """Entries that are other ones now, by key or place."""
        now, old = self.container, self.old
        if isinstance(now, (list, deque)):
            before = list(old)
            pairs = enumerate(now)
            return {k: v for k, v in pairs if k >= len(before) or before[k] is not v}
        if isinstance(now, set):
            return {each: each for each in now - old}
        return {k: v for k, v in now.items() if k not in old or old[k] is not v}


class Outliving:
    """Attributes of modules and objects, lists and dicts that a step may write.

    Attributes:
        tensors: `id` -> name of tensors that functions name.

    Args:
        modules: Name -> module, of the model and beside it.
        outside: What the step's functions reach beside the model.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], outside: Outside) -> None:
        self.tensors: dict[int, str] = {}
        self._outside = outside
        self._saved: list[_Saved] = []
        self._met: dict[int, Any] = {}
        for name, module in modules.items():
            held = vars(module)
            self._save(name or "the model", "", type(module), held)
            for key, value in held.items():
                if type(value) in CONTAINERS and id(value) not in self._met:
                    self._save(f"{name}.{key}" if name else key, key, type(module), value)
        self._generators: dict[int, tuple[str, Any, Any]] = {}
        for name, generator in global_generators():
            self.meet(name, generator, True)
        self._first: dict[Slot, Any] = {}

    def _save(
        self, name: str, word: str, kind: type | None, container: Any, outlives: bool = True
    ) -> None:
        self._met[id(container)] = container
        self._saved.append(_Saved(name, word, kind, container, container.copy(), outlives))

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Give back at the end what was there, and forget what functions cache inside."""
        misses = [cache.cache_info().misses for cache in self._outside.caches]
        try:
            yield
        finally:
            for cache, before in zip(self._outside.caches, misses, strict=True):
                if cache.cache_info().misses != before:
                    cache.cache_clear()
            for saved in reversed(self._saved):
                restore(saved.container, saved.old)
            for _, generator, state in self._generators.values():
                _put_state(generator, state)

    def meet(self, name: str, value: Any, outlives: bool) -> None:
        """Functions name a value, and may write to it, draw from it or compute with it."""
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), name)
        elif id(value) in self._met:
            return
        elif is_generator(value):
            self._generators[id(value)] = name, value, _state(value)
        elif type(value) in CONTAINERS:
            self._save(name, name.rpartition(".")[2], None, value, outlives)
        elif _is_users_object(value):
            self._save(name, "", type(value), vars(value), outlives)
        self._met[id(value)] = value

    def drawn_from(self) -> str | None:
        """Name of a generator of NumPy's or Python's that has drawn; None if none has."""
        known = self._generators.values()
        changed = (n for n, each, state in known if repr(_state(each)) != repr(state))
        return next(changed, None)

    def note(self) -> None:
        """The first of two runs has been."""
        self._first = {slot: kept(value) for slot, value in self._changes().items()}

    def _changes(self) -> dict[Slot, Any]:
        return {
            (k, key): value
            for k, saved in enumerate(self._saved)
            for key, value in saved.changes().items()
            if saved.outlives
            and saved.word not in _MODULE_OWN
            and (saved.word or key not in _MODULE_OWN)
        }

    def refuse_lost(self, executed: Executed, is_state: Callable[[torch.Tensor], bool]) -> None:
        """Refuse what the step writes, and functions read where this step does not come.

        That is tensors which change from step to step, and values that each run changes again.
        In another mode, or when another method is called, they would be those of before.

        Args:
            executed: Code of the user's that ran -> offsets of what ran.
            is_state: Whether a tensor changes from step to step.

        Raises:
            CaptureError: Names it and a line that reads it.
        """
        now = self._changes()
        for slot, value in self._first.items():
            found = [each for each in leaves(value) or () if isinstance(each, FakeTensor)]
            again = now.get(slot, value)
            is_counted = not found and is_plain(value) and differs(again, value)
            if not is_counted and not any(map(is_state, found)):
                continue
            saved = self._saved[slot[0]]
            line = _reader(saved.word or str(slot[1]), self._codes(saved.kind, executed))
            if line:
                name = saved.name if saved.word else f"{slot[1]!r} of {saved.name}"
                raise CaptureError(
                    f"State that a step writes must be kept in buffers: {name} is written by the "
                    f"step, which would lose it, and read at {line}, where this step does not "
                    f"come. Keep it in a buffer (register_buffer) and write into that."
                )

    def _codes(self, kind: type | None, executed: Executed) -> Executed:
        """Code that may read attributes of a class: its methods, and functions of no class."""
        bases = kind.__mro__ if kind is not None else ()
        names = {base.__name__ for base in bases}
        found: Executed = {}
        for code, offsets in executed.items():
            owner = code.co_qualname.rpartition(".")[0].rpartition(".")[2]
            if kind is None or owner in names or owner in ("", "<locals>"):
                found[code] = offsets
        for base in bases:
            for each in vars(base).values():
                behind = getattr(function_behind(each), "__code__", None)
                if behind is not None and is_users(behind.co_filename):
                    found.setdefault(behind, set())
        return found


@contextlib.contextmanager
def left_alone(modules: Mapping[str, torch.nn.Module], outside: Outside) -> Iterator[None]:
    """Put back what functions write to inside, other than values of tensors.

    Args:
        modules, outside: As for `Outliving`.
    """
    outliving = Outliving(modules, outside)
    try:
        with outliving.put_back(), followed({}, outliving.meet):
            yield
    finally:
        for variable in outside.variables:
            if differs(variable.present(), variable.value):
                variable.put(variable.value)


@contextlib.contextmanager
def followed(found: Executed, meet: Meet) -> Iterator[None]:
    """Follow the user's functions that run inside.

    Args:
        found: Gets their code, with the offsets of what runs of it.
        meet: Gets what their names and arguments stand for, and the attributes of these, with
            the name and whether it was there before.
    """

    def step(frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            found[frame.f_code].add(frame.f_lasti)
        return step

    def call(frame: types.FrameType, event: str, argument: Any) -> Any:
        if not is_users(frame.f_code.co_filename):
            return None
        found.setdefault(frame.f_code, set())
        _meet_all(frame, meet)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def _meet_all(frame: types.FrameType, meet: Meet) -> None:
    code, names = frame.f_code, frame.f_globals
    for name in code.co_names:
        if name in names:
            _meet_parts(name, names[name], True, meet)
    enclosed = () if _is_inner(frame) else code.co_freevars
    for name, value in frame.f_locals.items():
        _meet_parts(name, value, name in enclosed, meet)


def _meet_parts(name: str, value: Any, outlives: bool, meet: Meet) -> None:
    meet(name, value, outlives)
    own = getattr(value, "__dict__", None)
    if type(own) is dict and not isinstance(value, (type, types.ModuleType)):
        for key, part in own.items():
            meet(f"{name}.{key}", part, outlives)


def _is_inner(frame: types.FrameType) -> bool:
    """Whether a function was made by one that is running: its variables are those of this run."""
    above = frame.f_back
    while above is not None and not above.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code in above.f_code.co_consts:
            return True
        above = above.f_back
    return False


def _reader(word: str, codes: Executed) -> str:
    """A line that reads a name and did not run; empty if there is none."""
    for code, offsets in codes.items():
        steps = list(dis.get_instructions(code))
        line = code.co_firstlineno
        for k, step in enumerate(steps):
            line = step.starts_line if type(step.starts_line) is int else line
            if step.opname not in _READS or step.argval != word or step.offset in offsets:
                continue
            after = [*steps[k + 1 : k + 3], step, step]
            is_kind_asked = any(each.argval == "isinstance" for each in steps[max(k - 2, 0) : k])
            is_written = after[0].argval in WRITERS or after[1].opname in _STORES
            if not is_kind_asked and not is_written:
                return f"{code.co_filename.rpartition('/')[2]}:{line}"
    return ""


def _is_users_object(value: Any) -> bool:
    """Whether a value has attributes that functions may write: no module, class or function."""
    kind = type(value)
    if type(getattr(value, "__dict__", None)) is not dict or isinstance(value, _NO_OBJECTS):
        return False
    home = sys.modules.get(kind.__module__)
    return kind is types.SimpleNamespace or is_users(getattr(home, "__file__", None) or "<>")


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
