"""Optimizers as texts: `sgd`, or with options `adamw:lr=1e-3,betas=(0.9,0.95)`."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Sequence
from typing import Any

from devplace.errors import InputError, did_you_mean

CLASSES = (
    *("SGD", "Adam", "AdamW", "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop"),
)
"""Of `torch.optim`, those that capture takes."""
_BY_NAME = {name.lower(): name for name in CLASSES}
_DEFAULTS: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.01}}


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options.

    Raises:
        InputError: No such optimizer, or options that are not `name=value` with plain values.

    Example:
        >>> parse_optimizer("adamw:lr=1e-3,betas=(0.9,0.95)")
        ('adamw', {'lr': 0.001, 'betas': (0.9, 0.95)})
    """
    name, _, options = text.partition(":")
    if name not in _BY_NAME:
        raise InputError(
            f"Unknown optimizer {name!r}.{did_you_mean(name, _BY_NAME)} "
            f"Known: {', '.join(_BY_NAME)}."
        )
    try:
        call = ast.parse(f"_({options})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        pairs = [(pair.arg, ast.literal_eval(pair.value)) for pair in call.keywords]
        values = {key: value for key, value in pairs if key is not None}
        if len(values) < len(pairs):
            raise ValueError
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise InputError(
            f"--optimizer must look like adamw:lr=1e-3,weight_decay=0.1, got {text!r}."
        ) from None
    for key, value in values.items():
        if not _is_finite(value):
            raise InputError(f"--optimizer {text}: {key} must be finite, got {value}.")
    return name, {**_DEFAULTS.get(name, {}), **values}


def _is_finite(value: Any) -> bool:
    """Whether no number in a plain value is infinite."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_like(value: Any, option: inspect.Parameter) -> bool:
    """Whether a value is of the kind that an option takes; torch takes any text for true."""
    if isinstance(option.default, bool):
        return isinstance(value, bool)
    if isinstance(option.default, (int, float)):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return not isinstance(value, str) or "str" in str(option.annotation)


def _kind(option: inspect.Parameter) -> str:
    if isinstance(option.default, bool):
        return "True or False"
    return "a number" if isinstance(option.default, (int, float)) else "no text"


def make_optimizer(text: str, parameters: Sequence[Any]) -> Any:
    """The optimizer over these parameters.

    Raises:
        InputError: As `parse_optimizer`; or torch has no such optimizer, or refuses an option.
    """
    import torch

    name, options = parse_optimizer(text)
    made = getattr(torch.optim, _BY_NAME[name], None)
    if made is None:
        raise InputError(f"torch {torch.__version__} has no optimizer {_BY_NAME[name]}.")
    known = inspect.signature(made).parameters
    for key, value in options.items():
        if key not in known:
            names = [name for name in known if name != "params"]
            raise InputError(
                f"--optimizer {text}: torch.optim.{made.__name__} has no option {key!r}."
                f"{did_you_mean(key, names)} Known: {', '.join(names)}."
            )
        if not _is_like(value, known[key]):
            raise InputError(
                f"--optimizer {text}: {key} must be {_kind(known[key])}, got {value!r}. "
                f"torch's own value is {known[key].default}."
            )
    try:
        return made(parameters, **options)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(
            f"torch.optim.{made.__name__} does not take --optimizer {text}: {reason}."
        ) from error
