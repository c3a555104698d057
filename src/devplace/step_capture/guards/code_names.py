"""Names and attributes that the code of a function reads."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from devplace.step_capture.tags import is_user_file

_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "IMPORT_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_STORED_LOCALS = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_STORED_ITEMS = ("STORE_SUBSCR", "DELETE_SUBSCR")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_COMPARISONS = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
_COMPARED = 10  # instructions of `type(a.b) is c.Tensor`
_NOISE = ("COPY", "CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "SWAP")
_ITEM_GETTERS = ("get", "setdefault", "pop")
_ASKED = {"getattr": "maybe", "hasattr": "maybe"}
_ASKED |= dict.fromkeys(("vars", "asdict", "astuple", "copy", "deepcopy"), "every")
WRITERS = ("append", "appendleft", "extend", "insert", "add", "update", "clear", "discard")
LOADS = (*_VARIABLES, *_ATTRIBUTES)
UNKNOWN = ""
"""Stands for what has no name in the code: results of calls, parts of containers."""


class Use(NamedTuple):
    """How a value is read.

    Attributes:
        kind: `attribute`, `maybe` (an attribute that may be missing), `item` by a constant key,
            `every` (all attributes), or `whole` (passed on, iterated over, indexed by a variable).
        key: Name of the attribute, or key of the item.
    """

    kind: str
    key: Any = None


WHOLE, EVERY = Use("whole"), Use("every")


class Names(NamedTuple):
    """Names in a function's code and in functions inside it.

    Attributes:
        code: Of the function.
        is_users: Whether it is the user's, not of a package.
        variables: Globals, free variables and imported modules that are read, and globals set.
        uses: Name of a variable, argument, attribute or key -> how what it stands for is read.
        late: Attributes and variables that code sets further up than it reads them.
    """

    code: types.CodeType
    is_users: bool
    variables: frozenset[str]
    uses: dict[Any, frozenset[Use]]
    late: frozenset[str]


@functools.cache
def names_of(code: types.CodeType) -> Names:
    """What code reads, by the order of its instructions; which of them run is not known."""
    found: dict[Any, set[Use]] = defaultdict(set)
    is_stored: dict[str, bool] = {}  # by what comes first
    aliases: list[tuple[Any, str]] = []
    steps = [part for step in dis.get_instructions(code) for part in _parts(step)]
    variables = {step.argval for step in steps if step.opname in (*_VARIABLES, "STORE_GLOBAL")}
    for _, name, is_store in uses_of_names(code):
        is_stored.setdefault(name, is_store)
    _follow(steps, found, aliases)
    for _ in range(2):
        for name, alias in aliases:
            found[name] |= found[alias]
    for name in (*code.co_varnames[num_arguments(code) :], *code.co_cellvars):
        found[UNKNOWN] |= found[name]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            below = names_of(inner)
            variables |= below.variables
            for name, each in below.uses.items():
                found[name] |= each
    uses = {name: frozenset(kinds) for name, kinds in found.items() if kinds}
    is_own = is_users(code.co_filename)
    late = frozenset(name for name, is_store in is_stored.items() if is_store)
    return Names(code, is_own, frozenset(variables), uses, late)


def uses_of_names(code: types.CodeType) -> Iterator[tuple[int, str, bool]]:
    """Offset and name of instructions that read or set one, and whether they set it."""
    for step in dis.get_instructions(code):
        if step.opname in LOADS or step.opname in _STORES:
            yield step.offset, step.argval, step.opname in _STORES


def line_that_asks_type(code: types.CodeType) -> int:
    """A line that compares `type(...)`, or its name, with a class of tensors; 0: none."""
    steps, line = list(dis.get_instructions(code)), code.co_firstlineno
    for k, step in enumerate(steps):
        line = step.starts_line if type(step.starts_line) is int else line
        if step.opname not in _COMPARISONS:
            continue
        names = [each.argval for each in steps[max(k - _COMPARED, 0) : k]]
        asks = any(name in ("type", "__class__") for name in names)
        if asks and any(name in ("Tensor", "Parameter") for name in names):
            return line
    return 0


@functools.cache
def is_users(filename: str) -> bool:
    """Whether code is the user's; that from `exec`, stdin or a notebook has no file."""
    if filename.startswith("<"):
        return not filename.startswith(("<frozen", "<eval_with_key>", "<__array_function__"))
    return bool(filename) and is_user_file(filename) and "-packages" not in filename


def num_arguments(code: types.CodeType) -> int:
    """How many of a function's first variables are arguments, with `*args` and `**kwargs`."""
    further = bool(code.co_flags & inspect.CO_VARARGS) + bool(
        code.co_flags & inspect.CO_VARKEYWORDS
    )
    return code.co_argcount + code.co_kwonlyargcount + further


class _Op(NamedTuple):
    opname: str
    argval: Any
    argrepr: str


def _parts(step: dis.Instruction) -> list[_Op]:
    """An instruction; two where it does what two did, none where it does not matter."""
    if step.opname in _NOISE:
        return []
    if not isinstance(step.argval, tuple) or step.opname.count("_FAST") != 2:
        return [_Op(step.opname, step.argval, step.argrepr)]
    first = "STORE_FAST" if step.opname.startswith("STORE") else "LOAD_FAST"
    second = "LOAD_FAST" if "_LOAD_FAST" in step.opname else "STORE_FAST"
    return [_Op(first, step.argval[0], ""), _Op(second, step.argval[1], "")]


def _follow(steps: list[_Op], found: dict[Any, set[Use]], aliases: list[tuple[Any, str]]) -> None:
    """Note what is read of each name: `a.b["c"]` reads `b` of `a`, and `c` of `b`."""
    end = _Op("", None, "")
    steps = [*steps, end, end]
    asked, at = "", 0
    while at < len(steps) - 2:
        step = steps[at]
        name = UNKNOWN
        if step.opname in _VARIABLES or step.opname.startswith("LOAD_FAST"):
            name = step.argval
            at += 1
        elif step.opname not in _ATTRIBUTES:
            at += 1
            continue
        for holder, use, key, end_of in _chain(steps, at, name):
            found[holder].add(use)
            name, at = key, end_of
        step, after = steps[at], steps[at + 1]
        is_method = step.opname.startswith("CALL") and step.argval == 0  # `x.copy()`
        if name in _ASKED and not is_method:
            asked = _ASKED[name]
        elif asked == "maybe" and step.opname in _CONSTANTS and _is_argument(steps, at):
            found[name].add(Use("maybe", step.argval))
            asked = ""
        elif asked:
            found[name] |= {EVERY, WHOLE}
            asked = ""
        elif step.opname in _STORED_LOCALS:
            aliases.append((name, step.argval))
        elif after.opname not in _STORED_ITEMS:
            found[name].add(WHOLE)


def _chain(steps: list[_Op], at: int, name: Any) -> Iterator[tuple[Any, Use, Any, int]]:
    """Attributes and items read one after another from a place on.

    Yields:
        Name of the holder, how it is read, name of what is read, and the place after that.
    """
    while True:
        step, after = steps[at], steps[at + 1]
        key, taken = step.argval, 1
        if step.opname in _ATTRIBUTES and key in _ITEM_GETTERS and _is_key(after):
            use, key, taken = Use("item", after.argval), after.argval, 2
        elif step.opname in _ATTRIBUTES:
            use = EVERY if key == "__dict__" else Use("attribute", key)
        elif _is_key(step) and (after.opname == "BINARY_SUBSCR" or after.argrepr == "[]"):
            use, taken = Use("item", key), 2
        else:
            return
        at += taken
        yield name, use, key, at
        name = key


def _is_key(step: _Op) -> bool:
    return step.opname in _CONSTANTS and isinstance(step.argval, (str, int))


def _is_argument(steps: list[_Op], at: int) -> bool:
    """Whether a constant is passed as it is, with or without a default; not `"w" + str(k)`."""
    after = at + 1
    while after + 1 < len(steps) and steps[after].opname.startswith("LOAD"):
        after += 1
    is_call = steps[after].opname.startswith("CALL")
    return is_call and steps[after].argval == (2 if after == at + 1 else 3)
