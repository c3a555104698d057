"""Which variables, attributes and items the code of a function names."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_STORE = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")
_VARIABLE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_CONSTANT = ("LOAD_CONST", "LOAD_SMALL_INT")
_OF_ALL = ("vars", "asdict", "astuple", "copy", "deepcopy")
_NO_MATTER = ("COPY", "CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "SWAP")


class Item(NamedTuple):
    """An item by a constant key, as `["beta"]` or `.get("beta")`."""

    key: Any


class Perhaps(NamedTuple):
    """An attribute that may be missing, as in `getattr(args, "beta", 1.0)`."""

    key: str


class Every(NamedTuple):
    """All attributes, as in `vars(args)` or `getattr(args, name)`."""

    of: str = "all"


Part = str | Item | Perhaps | Every
Named = tuple[str, str, list[Part]]


@functools.cache
def named(code: types.CodeType) -> tuple[Named, ...]:
    """Variables from outside and arguments that code reads, inner functions included.

    A local variable that is assigned once stands for what it was given (`c = self.config`).

    Returns:
        For each reading the kind (`variable`, `argument`, `import`, or `local` for a variable of
        unknown value), the name, and the attributes and items read of it one after another.
    """
    return tuple(_Reading(code).find())


class _Op(NamedTuple):
    opname: str
    argval: Any
    argrepr: str


def _parts(step: dis.Instruction) -> list[_Op]:
    """An instruction; two where it does what two did, none where it does not matter."""
    if step.opname in _NO_MATTER:
        return []
    if not isinstance(step.argval, tuple) or step.opname.count("_FAST") != 2:
        return [_Op(step.opname, step.argval, step.argrepr)]
    first = "STORE_FAST" if step.opname.startswith("STORE") else "LOAD_FAST"
    second = "LOAD_FAST" if "_LOAD_FAST" in step.opname else "STORE_FAST"
    return [_Op(first, step.argval[0], ""), _Op(second, step.argval[1], "")]


class _Reading:
    def __init__(self, code: types.CodeType) -> None:
        self._code = code
        count = code.co_argcount + code.co_kwonlyargcount
        steps = [each for step in dis.get_instructions(code) for each in _parts(step)]
        stored = [step.argval for step in steps if step.opname in _STORE]
        arguments = frozenset(code.co_varnames[:count]) - frozenset(stored)
        self._steps = steps
        self._once = {name for name in stored if stored.count(name) == 1}
        self._known: dict[str, Named] = {name: ("argument", name, []) for name in arguments}

    def find(self) -> Iterator[Named]:
        steps, at = self._steps, 0
        current: Named | None = None
        while at < len(steps):
            if current is not None:
                taken = _taken(steps, at, current[2])
                at += taken
                if taken:
                    continue
                is_alias = self._is_alias(steps[at])
                if is_alias:
                    self._known[steps[at].argval] = current
                if not (is_alias and _is_owner(current)) and not _is_written_to(steps, at):
                    yield _with_every_last(current)
            current = self._root(at)
            at += 1
        for constant in self._code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._of_inner(constant)

    def _is_alias(self, step: _Op) -> bool:
        return step.opname in _STORE and step.argval in self._once

    def _root(self, at: int) -> Named | None:
        step = self._steps[at]
        name = step.argval
        if step.opname == "IMPORT_NAME":
            return ("import", name, [])
        if not step.opname.startswith("LOAD_FAST") and step.opname not in _VARIABLE:
            return None
        known = None if step.opname == "LOAD_GLOBAL" else self._known.get(name)
        is_local = step.opname not in _VARIABLE or name in self._code.co_cellvars
        kind, name, path = known or ("local" if is_local else "variable", name, [])
        if at and self._steps[at - 1].argval in ("getattr", "hasattr"):
            return (kind, name, [*path, Perhaps("")])  # its name comes next
        if at and self._steps[at - 1].argval in _OF_ALL:
            return (kind, name, [*path, Every()])
        return (kind, name, list(path))

    def _of_inner(self, constant: types.CodeType) -> Iterator[Named]:
        """What an inner function reads, by the names that it has here."""
        for kind, name, path in named(constant):
            if kind in ("argument", "local"):
                yield ("local", name, path)
                continue
            known = self._known.get(name) if name in constant.co_freevars else None
            if kind == "variable" and known is not None:
                yield (known[0], known[1], [*known[2], *path])
            elif name not in self._code.co_cellvars:
                yield (kind, name, path)


def _with_every_last(current: Named) -> Named:
    """`vars` and its like are named before what they are given."""
    kind, name, path = current
    if Every() not in path:
        return current
    return (kind, name, [*(part for part in path if part != Every()), Every()])


def _is_owner(current: Named) -> bool:
    """Whether nothing but an argument or a module is read."""
    return current[0] != "variable" and not current[2]


def _taken(steps: list[_Op], at: int, path: list[Part]) -> int:
    """Lengthen a path by what is read next; gives the number of instructions that do it."""
    step = steps[at]
    if Perhaps("") in path and (step.opname in _CONSTANT or step.opname not in _ATTRIBUTE):
        path.remove(Perhaps(""))
        is_name = step.opname in _CONSTANT and isinstance(step.argval, str)
        path.append(Perhaps(step.argval) if is_name and _is_argument(steps, at) else Every())
        return int(is_name)
    if step.opname in _ATTRIBUTE:
        path.append(step.argval)
        return 1
    if step.opname not in _CONSTANT or not _is_key(step.argval) or at + 1 == len(steps):
        return 0
    after = steps[at + 1]
    if after.opname == "BINARY_SUBSCR" or after.argrepr == "[]":
        path.append(Item(step.argval))
        return 2
    if path and path[-1] == "get":
        path[-1] = Item(step.argval)
        return 1
    return 0


def _is_argument(steps: list[_Op], at: int) -> bool:
    """Whether a constant is passed as it is, with or without a default; not `"w" + str(k)`."""
    after = at + 1
    while after + 1 < len(steps) and steps[after].opname.startswith("LOAD"):
        after += 1
    is_call = steps[after].opname.startswith("CALL")
    return is_call and steps[after].argval == (2 if after == at + 1 else 3)


def _is_key(value: Any) -> bool:
    return isinstance(value, (str, int))


def _is_written_to(steps: list[_Op], at: int) -> bool:
    """Whether what was read last is only where an item is stored."""
    following = [step.opname for step in steps[at : at + 2]]
    return len(following) == 2 and following[1] in ("STORE_SUBSCR", "DELETE_SUBSCR")
