"""Follow the Python functions of a step to see what they read and write."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from devplace.errors import CaptureError
from devplace.step_capture.guards.attribute_reads import Reads
from devplace.step_capture.guards.code_names import (
    UNKNOWN,
    Names,
    is_users,
    line_that_asks_type,
    names_of,
    num_arguments,
    uses_of_names,
)
from devplace.step_capture.guards.rechecked import Place, enclosed, tried
from devplace.step_capture.guards.values import differs, is_array, is_inside, kept, leaves
from devplace.step_capture.guards.written import Outliving, Written, no_buffer, refuse_lost
from devplace.step_capture.sources import Slots
from devplace.step_capture.tags import is_user_file

_BY_RULE = ("__getattr__", "__getattribute__")
_LAYERS = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "nn") + os.sep
_RUN = str(Path(__file__).resolve().parents[2] / "run") + os.sep
_VARIABLES: Any = type(os.environ)
_ENVIRONMENT = {
    getattr(_VARIABLES, name).__code__: name
    for name in ("__getitem__", "__setitem__", "__delitem__")
}
_OF_ENVIRONMENT = (_VARIABLES.__getitem__.__code__.co_filename, Mapping.get.__code__.co_filename)
_MODULE = torch.nn.Module.__call__.__code__.co_filename


class Frames:
    """What the functions of a step read and may write, noted as they are called.

    The step is run twice. What both runs meet outlives the step. In the second run, opcodes are
    followed where it matters which of a function's reads and writes came first, or came at all.

    Attributes:
        reads: What functions read.
        outliving: What they may write.
        values_read: `id` -> tensor from outside whose values decide what the step is.

    Args:
        model: The module.
        loss_fn: As the user gave it.
        slots: Where the model's sources are.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Any, slots: Slots | None = None) -> None:
        self.outliving = Outliving()
        self.reads = Reads(model, self.outliving, slots)
        self.values_read: dict[int, torch.Tensor] = {}
        self._changed: list[tuple[Place, Any]] = []
        self._executed: dict[int, dict[int, None]] = {}  # id of code -> offsets, in order
        self._watched: set[int] = set()
        self._names: dict[int, Names | None] = {}  # id of code -> what it reads
        self._codes: list[types.CodeType] = []  # so that ids stay their own
        self._users: set[int] = set()  # code of the user's that ran
        self._inner: set[int] = set()
        self._entered: set[Any] = set()
        if loss_fn is not None:
            self.reads.meet("loss_fn", loss_fn, True)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the functions that run inside."""
        before = sys.gettrace()
        if self._watched:  # Python 3.12 asks for opcodes only if some frame did before
            sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def followed_again(self) -> contextlib.AbstractContextManager[None]:
        """Follow the functions of the second run, if the first one left a question open."""
        is_open = self._watched or not all(map(self._stays, self.reads.places))
        is_open = is_open or not self.outliving.is_known(self._is_there)
        return self.followed() if is_open else contextlib.nullcontext()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Give back at the end what was there."""
        try:
            yield
        finally:
            self.outliving.put_back()
            for place in self.reads.places:
                is_weight = place.module is not None and isinstance(place.value, torch.Tensor)
                if not is_weight and differs(place.present(), place.value):  # it may be a twin
                    place.put_back()

    def note(self) -> None:
        """The first of two runs is over.

        Raises:
            CaptureError: It has made a module of the model.
        """
        self.outliving.note()
        for place in self.reads.places:
            now = place.present()
            if differs(now, place.value):
                if place.module is not None and isinstance(now, torch.nn.Module):
                    raise _made_inside(place.described)
                self._changed.append((place, kept(now)))
            for names in self.reads.readers_of(place):
                if place.key in names.late:
                    self._watched.add(id(names.code))
        self.reads.start_again()
        self._entered = set()
        words = self.outliving.words() | {str(place.key) for place, _ in self._changed}
        self._watched |= {
            id(c) for c in self._codes if words & {*c.co_names, *c.co_freevars, *c.co_varnames}
        }

    def refuse_lost(
        self, is_state: Callable[[torch.Tensor], bool], addresses: Collection[int]
    ) -> None:
        """See `written.refuse_lost`; `addresses` are those of arrays that tensors write to."""
        for place in self.reads.places:
            now = place.present() if addresses and self._stays(place) else None
            if is_array(now) and is_inside(addresses, now):
                raise no_buffer(place.described)
        ran = [code for code in self._codes if id(code) in self._users]
        executed = {code: self._executed.get(id(code), {}) for code in ran}
        written = [each for each in self.outliving.written() if self._is_there(each.owner)]
        for place, first in self.changed:
            kind = type(place.holder) if place.kind == "attribute" else None
            is_global = isinstance(place.holder, dict) and "__builtins__" in place.holder
            is_own = kind is not None and (is_array(first) or place.names is None)
            if is_global or is_own or place.kind in ("variable", "context"):
                now, name = kept(place.present()), place.described
                written.append(Written(name, str(place.key), kind, first, now, None))
        refuse_lost(written, executed, is_state)

    @property
    def changed(self) -> list[tuple[Place, Any]]:
        """Places whose values the first run has changed, with what they became."""
        return [(place, now) for place, now in self._changed if self._stays(place)]

    def kept(self) -> set[int]:
        """`id` of tensors that are noted as values of the first run."""
        values = [*self.outliving.first.values(), *(now for _, now in self._changed)]
        return {id(leaf) for value in values for leaf in leaves(value) or ()}

    def name_of(self, value: Any) -> str | None:
        """Name of an object that is there after the step; None for others."""
        is_known = id(value) in self.reads.stays
        return self.outliving.names.get(id(value), type(value).__name__) if is_known else None

    def found(self) -> list[Place]:
        """What two runs have read and not changed, and is there after the step."""
        changed = {id(place) for place, _ in self._changed}
        return [
            self._reachable(place)
            for place in self.reads.places
            if id(place) not in changed and self._stays(place) and not self._is_set_first(place)
        ]

    def _is_set_first(self, place: Place) -> bool:
        """Whether all code that reads a place has set it before."""
        readers = self.reads.readers_of(place)
        return bool(readers) and all(self._sets_first(each, place.key) for each in readers)

    def _stays(self, place: Place) -> bool:
        """Whether a place is there after the step: two runs have met what holds it."""
        return place.outlives or self._is_there(place.holder)

    def _reachable(self, place: Place) -> Place:
        """A place with the way to it, as far as that is there after the step."""
        above = place.above
        if above is None or not self._stays(above):
            return replace(place, above=None)
        return replace(place, above=self._reachable(above))

    def _is_there(self, value: Any) -> bool:
        is_met = id(value) in self.reads.stays or id(value) in self.reads.met
        return is_met or isinstance(value, type)

    def _sets_first(self, names: Names, key: Any) -> bool:
        """Whether what ran of some code has set a name before it read it."""
        if key not in names.late:
            return False
        is_store = {at: is_store for at, name, is_store in uses_of_names(names.code) if name == key}
        ran = (is_store[at] for at in self._executed.get(id(names.code), ()) if at in is_store)
        return next(ran, False)

    # ---- calls

    def _call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        try:
            names = self._names[id(code)]
        except KeyError:
            names = self._names[id(code)] = _followed_names(frame)
            self._codes.append(code)
        if names is None:
            if code in _ENVIRONMENT:
                self._environment(frame)
            return None
        values = frame.f_locals
        if names.is_users:
            self._variables(frame, names, values)
        for name in code.co_varnames[: num_arguments(code)]:
            self.reads.argument(name, values.get(name), names)
        frame.f_trace_opcodes, frame.f_trace_lines = id(code) in self._watched, False
        return self._step

    def _environment(self, frame: types.FrameType) -> None:
        """A variable of the process is read, by way of `os.getenv`, `get` or as an item, or set."""
        key, by = frame.f_locals["key"], frame.f_back
        while by is not None and by.f_code.co_filename in _OF_ENVIRONMENT:
            by = by.f_back
        if by is not None and is_users(by.f_code.co_filename):
            is_read = _ENVIRONMENT[frame.f_code] == "__getitem__"
            if not is_read and tried(os.environ.get, key) != frame.f_locals.get("value"):
                raise _sets(key, f"{Path(by.f_code.co_filename).name}:{by.f_lineno}")
            at = Place("os.environ", None, None, os.environ)
            self.reads.keep(at.item(key, tried(os.environ.get, key)))

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "opcode":
            self._executed.setdefault(id(code), {}).setdefault(frame.f_lasti)
        elif event == "return" and frame.f_back is not None:
            caller = self._names.get(id(frame.f_back.f_code))
            if caller is not None:
                self.reads.argument(code.co_name, argument, caller, UNKNOWN)
        return self._step

    def _variables(self, frame: types.FrameType, names: Names, values: Mapping[str, Any]) -> None:
        code = frame.f_code
        if id(code) not in self._users:
            line = line_that_asks_type(code)
            if line:
                raise _asks_type(f"{Path(code.co_filename).name}:{line}")
            self._users.add(id(code))
            self._inner |= {id(c) for c in code.co_consts if isinstance(c, types.CodeType)}
        free = {name: values[name] for name in code.co_freevars if name in values}
        free.pop("__class__", None)
        mark = (id(code), id(frame.f_globals), *map(id, free.values()))
        if mark not in self._entered:
            self._entered.add(mark)
            cells = self._cells(code, free)
            self.reads.variables(names, frame.f_globals, cells)
            for name in free.keys() - cells.keys():
                self.reads.argument(name, free[name], names)

    def _cells(self, code: types.CodeType, free: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Cells of the free variables of a function that is called, by name.

        A frame does not tell its function: it is one that has been met and has these values. A
        function inside one that ran is made anew in every step, and so are its variables.
        """
        if not free or id(code) in self._inner:
            return {}
        if code not in self.reads.functions:
            for each in gc.get_referrers(code):
                if isinstance(each, types.FunctionType):
                    self.reads.meet(each.__name__, each, True)
        found: dict[str, list[Any]] = {}
        for function in self.reads.functions.get(code, ()):
            cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
            if all(enclosed(cells[name]) is value for name, value in free.items()):
                for name, cell in cells.items():
                    found.setdefault(name, []).append(cell)
        return found


@contextlib.contextmanager
def left_alone(model: torch.nn.Module, loss_fn: Any) -> Iterator[None]:
    """Put back what functions of a step write to inside, other than values of tensors."""
    frames = Frames(model, loss_fn)
    with frames.put_back(), frames.followed():
        yield


def _followed_names(frame: types.FrameType) -> Names | None:
    """Names in code of the user's, of packages and of torch's layers; None for other code."""
    code = frame.f_code
    file = code.co_filename
    if file.startswith("<"):
        file = frame.f_globals.get("__file__", file)
        if "_tuple_new" in code.co_names or any("dataclass" in name for name in code.co_freevars):
            return None  # made by namedtuple or dataclass
    if code.co_name in _BY_RULE or file == _MODULE:  # attributes are taken up where they are named
        return None
    if file.startswith(_RUN):  # hooks of our own
        return None
    is_followed = is_users(file) or file.startswith(_LAYERS) or is_user_file(file)
    return names_of(code) if is_followed else None


def _made_inside(where: str) -> CaptureError:
    return CaptureError(
        f"Modules must be there before the step: {where} is made while it runs. Make it in "
        f"__init__, or call the model once before the optimizer is made."
    )


def _asks_type(where: str) -> CaptureError:
    return CaptureError(
        f"A class of tensors must be asked for by isinstance: {where} compares type(...) with it, "
        f"and tensors are of another class while a step is captured. Write isinstance(x, "
        f"torch.Tensor), or isinstance(x, torch.nn.Parameter)."
    )


def _sets(key: str, where: str) -> CaptureError:
    return CaptureError(
        f"Variables of the process must be set outside the step: {where} sets or deletes "
        f"os.environ[{key!r}], which later steps would not do. Do it before the step, or outside "
        f"of the loss."
    )
