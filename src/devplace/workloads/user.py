"""Workloads of the user: a function in a Python file that returns model, inputs and loss."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from devplace.errors import DevplaceError, InputError, did_you_mean
from devplace.workloads.workload import Workload, check_batch, check_size

_KEYWORDS = ("size", "batch", "device")
_RETURNS = (
    "Return (model, inputs, loss_fn): a torch.nn.Module, a tuple of tensors (or a dict of keyword "
    "inputs), a function; or (model, inputs) for an inference."
)


def load(
    spec: str,
    size: str = "full",
    batch: int | None = None,
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """Build a workload with a function of the user's.

    The function returns `(model, inputs, loss_fn)` with `loss_fn(model, *inputs)` the scalar loss,
    or `(model, inputs)` for an inference.
    It may take any of the keywords `size`, `batch`, `device`. If it takes no `device` and `meta` is
    asked for, it is called so that what it makes takes no memory; where that cannot work (it reads
    values, say) it is called once more on the CPU. The file's folder is put on `sys.path`, as
    `python file.py` would, for a file of a package that of the package too; `sys.argv` is empty.

    Args:
        spec: `path/to/file.py:function` or `package.module:function`.
        size: Passed on; refused if it is `small` and the function takes no `size`.
        batch: Passed on if given, else the function's default holds (None, if it has none);
            refused if the function takes no `batch`.
        device: `meta`, or where model and inputs shall lie.
        seed: Of torch's CPU generator while the function runs; the caller's state is restored.

    Raises:
        InputError: File or function is missing, its code raises (the message starts with
            `file:line`), takes other arguments, or returns something else.
    """
    check_size(size)
    check_batch(batch)
    path, function_name = _split(spec)
    from devplace.workloads.placing import parse_device

    target = parse_device(device)
    with _own_arguments(path):
        function = _function(_import(path), path, function_name)
    taken = _taken(function, spec)
    wanted = {"size": size, "batch": batch, "device": device}
    keywords = {key: wanted[key] for key in taken if wanted[key] is not None or taken[key]}
    for key, unset in (("size", "full"), ("batch", None)):
        if key not in taken and wanted[key] != unset:
            raise InputError(
                f"{spec} takes no `{key}`, but {key}={wanted[key]} was asked for. "
                f"Add the keyword `{key}` to the function, or leave it out."
            )
    with _own_arguments(path):
        result = _call(function, keywords, path, seed, target.type, "device" in taken)
    return _checked(spec, result, target)


def made_by(spec: str) -> Any:
    """What a function of the user's, or a class, gives when called without arguments.

    Args:
        spec: As for `load`.

    Raises:
        InputError: File or function is missing, or its code raises.
    """
    path, function_name = _split(spec)
    with _own_arguments(path):
        function = _function(_import(path), path, function_name)
        return _call(function, {}, path, 0, "cpu", False)


@contextmanager
def own_errors(spec: str, doing: str) -> Iterator[None]:
    """Errors of code that a function of the user's gave, as bad input.

    Args:
        spec: As for `load`.
        doing: What was done, for the message.

    Raises:
        InputError: The code raised; says where.
    """
    try:
        yield
    except DevplaceError:
        raise
    except (Exception, SystemExit) as error:
        raise _user_error(_split(spec)[0], error, doing) from error


def _split(spec: str) -> tuple[Path, str]:
    """File and function of `file.py:function`; both are there as text, the file also on disk."""
    file_text, separator, function_name = as_file(spec).rpartition(":")
    if not separator or not function_name or not file_text:
        file_text = as_file(spec).rstrip(":")
        known = _functions_of(Path(file_text)) if Path(file_text).is_file() else []
        hint = f" Functions there: {', '.join(known)}." if known else ""
        raise InputError(f"{spec!r} names no function. Use file.py:function.{hint}")
    path = Path(file_text)
    if not path.is_file():
        folder = path.parent
        others = (
            [other.name for other in folder.glob("*.py") if other.is_file()]
            if folder.is_dir()
            else []
        )
        guess = did_you_mean(path.name, others) if not path.exists() else " It is no file."
        what = "file" if file_text.endswith(".py") else "file or module"
        raise InputError(f"There is no {what} {file_text!r} to take {function_name!r} from.{guess}")
    return path, function_name


def as_file(spec: str) -> str:
    """`package.module:function` as `package/module.py:function`; what names a file stays as it is.

    A module is looked for from the present folder, then on `sys.path`.
    """
    name, separator, function = spec.partition(":")
    parts = name.split(".")
    if not separator or not all(part.isidentifier() for part in parts) or os.path.isfile(name):
        return spec
    for base in ("", *(entry for entry in sys.path if entry)):
        stem = os.path.join(base, *parts)
        for file in (f"{stem}.py", os.path.join(stem, "__init__.py")):
            if os.path.isfile(file):
                return f"{file}:{function}"
    return spec


def _functions_of(path: Path) -> list[str]:
    """Names of the public top-level functions of a file, without running it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return []
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_")]


def _import(path: Path) -> ModuleType:
    """Run the user's file as a module; a file that was loaded before is run again.

    A file of a package is the package's module, so that relative imports find their like. Then the
    folder that the package is in comes first on `sys.path`, and the file's own last.
    """
    resolved = path.resolve()
    packages = _packages(resolved)
    parent = str(resolved.parents[len(packages)])
    if parent not in sys.path:
        sys.path.insert(0, parent)
    if packages and str(resolved.parent) not in sys.path:
        sys.path.append(str(resolved.parent))
    parts = packages if resolved.stem == "__init__" else (*packages, resolved.stem)
    name = ".".join(parts) if packages else f"devplace_user_{resolved.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is not a Python file. Use file.py:function.")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    try:
        if len(parts) > 1:
            _import_package(".".join(parts[:-1]), resolved.parents[len(packages) - len(parts) + 1])
        sys.modules[name] = module  # dataclasses and pickle look their module up there
        spec.loader.exec_module(module)
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException as error:  # SystemExit, and what test runners and the like raise
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise _user_error(path, error, "importing it") from error
    return module


def _packages(path: Path) -> tuple[str, ...]:
    """Names of the packages that a file lies in, outermost first.

    These are the folders with an `__init__.py`, and as many as its relative imports go up.
    """
    count = _relative_level(path)
    for k, folder in enumerate(path.parents):
        if not (folder / "__init__.py").is_file():
            count = max(count, k)
            break
    folders = list(path.parents)[:count]
    return tuple(folder.name for folder in reversed(folders) if folder.name)


def _relative_level(path: Path) -> int:
    """Packages that the relative imports of a file need around it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return 0
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return max(levels, default=0)


def _import_package(name: str, folder: Path) -> None:
    """Import the package of a file.

    Raises:
        InputError: Another package of that name was found first.
    """
    package = importlib.import_module(name)
    places = [os.path.realpath(place) for place in getattr(package, "__path__", [])]
    if os.path.realpath(folder) not in places:
        found = ", ".join(places) or getattr(package, "__file__", None) or "a built-in module"
        raise InputError(
            f"A package must be the only one of its name: {name!r} is found at {found}, not at "
            f"{folder}. Rename one of them."
        )


@contextmanager
def _own_arguments(path: Path) -> Iterator[None]:
    """The user's code sees no arguments: those of the command line are not meant for it."""
    before = sys.argv
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = before


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    """The function of that name, or the error that names the nearest one."""
    try:
        found: Callable[..., Any] | None = getattr(module, name, None)
    except Exception as error:  # the module's own `__getattr__`
        raise _user_error(path, error, f"looking up {name}") from error
    if callable(found):
        return found
    known = _functions_of(path)
    listed = f" Functions there: {', '.join(known)}." if known else " It defines no function."
    what = "is missing" if found is None else "is not a function"
    raise InputError(f"Function {name!r} {what} in {path}.{did_you_mean(name, known)}{listed}")


def _taken(function: Callable[..., Any], spec: str) -> dict[str, bool]:
    """Which of size, batch, device the function takes -> whether it has no default for it.

    Any other argument without a default is refused.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InputError(f"{spec} is not a Python function. Use file.py:function.") from error
    taken: dict[str, bool] = {}
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD:
            taken = dict.fromkeys(_KEYWORDS, False) | taken
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in _KEYWORDS and parameter.kind is not parameter.POSITIONAL_ONLY:
            taken[parameter.name] = is_needed
        elif is_needed:
            raise InputError(
                f"{spec} needs the argument {parameter.name!r}, which devplace does not pass. "
                f"Give it a default; passed by keyword, if taken: {', '.join(_KEYWORDS)}."
            )
    return taken


def _call(
    function: Callable[..., Any],
    keywords: dict[str, Any],
    path: Path,
    seed: int,
    device_type: str,
    takes_device: bool,
) -> Any:
    """What the function returns; on meta first without memory, then, should that fail, on CPU."""
    from devplace.workloads.placing import seeded

    attempts: list[str | None] = [None]
    if device_type == "meta" and not takes_device:
        attempts = ["meta", None]
    for attempt in attempts:
        try:
            with seeded(seed, attempt):
                return function(**keywords)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, and what test runners and the like raise
            if attempt is None:
                given = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
                call = f"calling {_name_of(function)}({given})"
                raise _user_error(path, error, call) from error
    raise AssertionError("the last attempt returns or raises")


def _checked(spec: str, result: Any, target: Any) -> Workload:
    """The workload, if what the function returned can be one."""
    import torch

    from devplace.workloads.placing import devices_of, move

    if isinstance(result, Workload):
        result = (result.model, result.inputs, result.loss_fn)
    if isinstance(result, tuple) and len(result) == 2:
        result = (*result, None)
    if not isinstance(result, tuple) or len(result) != 3:
        shape = f"a tuple of {len(result)}" if isinstance(result, tuple) else _kind(result)
        raise InputError(f"{spec} returned {shape}, expected 2 or 3 values. {_RETURNS}")
    model, inputs, loss_fn = result
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{spec} returned {_kind(model)} as the model. {_RETURNS}")
    if not isinstance(inputs, tuple | list | dict):
        raise InputError(f"{spec} returned {_kind(inputs)} as the inputs. {_RETURNS}")
    if isinstance(inputs, dict) and not all(isinstance(key, str) for key in inputs):
        key = next(key for key in inputs if not isinstance(key, str))
        raise InputError(f"{spec} returned inputs with the key {key!r}, expected texts. {_RETURNS}")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"{spec} returned {_kind(loss_fn)} as the loss function. {_RETURNS}")
    if target.type != "meta" and "meta" in devices_of(model, inputs):
        raise InputError(
            f"{spec} returned tensors on device meta, expected values on {target}. "
            "Build the model on the `device` that is passed."
        )
    model, inputs = move(model, tuple(inputs) if isinstance(inputs, list) else inputs, target)
    return Workload(spec, model, inputs, loss_fn)


def _name_of(function: Callable[..., Any]) -> str:
    """Name of a function, or of the class of another callable."""
    return getattr(function, "__name__", type(function).__name__)


def _kind(value: Any) -> str:
    """`a list`, `an int`, `None`, as a reader would say it."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _user_error(path: Path, error: BaseException, doing: str) -> InputError:
    """One line: the user's file and line, the exception and its text."""
    line = 0
    if isinstance(error, SyntaxError) and _same_file(error.filename, path):
        line = error.lineno or 0
    for frame in traceback.extract_tb(error.__traceback__):
        if _same_file(frame.filename, path):
            line = frame.lineno or line
    text = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        text = f"it exits with {text or 0}"
    where = f"{path}:{line}" if line else str(path)
    return InputError(f"{where}: {type(error).__name__}{text and ': '}{text} (while {doing}).")


def _same_file(name: str | None, path: Path) -> bool:
    """Whether a frame's file is the user's."""
    return name is not None and os.path.realpath(name) == os.path.realpath(path)
