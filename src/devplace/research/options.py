"""Options of training that are the same for every system, and checks of their own settings. Loads
no torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from devplace.errors import InputError


@dataclass(frozen=True)
class TrainingOptions:
    """How a run is watched, kept and stopped; none of it changes what is learned.

    Attributes:
        log_dir: Folder for curves (`curves.csv`, TensorBoard's files) and checkpoints, each run in
            a folder of its own inside; None: nothing is written.
        resume: Go on from the checkpoint of the same run, if there is one; a note of the result
            says whether there was. Another problem, seed or setting is another run, and so is
            measuring. The result is that of a run that was never stopped, also with more
            evaluations than before.
        checkpoint_every: Evaluations between checkpoints.
        stall: Stop when nothing better was found for this many evaluations; None: never.
        most: Evaluations when the budget sets no limit at all.
        device: Where networks compute: `cpu`, `cuda` or `cuda:1`. On a GPU the same seed need not
            give the same plan, and steps measured there beside it are disturbed.

    Raises:
        InputError: A count that is not positive, or `resume` without `log_dir`.
    """

    log_dir: Path | str | None = None
    resume: bool = False
    checkpoint_every: int = 200
    stall: int | None = None
    most: int = 2400
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "stall", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}.")
        if self.resume and self.log_dir is None:
            raise InputError("To resume a run, give the log_dir (--log-dir) that it wrote to.")


SHARES = ("elite", "mix", "baseline_decay", "discount")
"""Settings between 0 and 1."""
POSITIVE = ("elite", "failing_s", "gradient_norm", "most_s", "tanh_constant", "temperature")
"""Numbers that must not be 0."""


def check_settings(placer: Any, zero: Collection[str] = (), even: Collection[str] = ()) -> None:
    """Refuse hyper-parameters that make no sense, by what their annotations say they are.

    Args:
        placer: A frozen dataclass with defaults.
        zero: Counts that may be 0.
        even: Counts that must be even.

    Raises:
        InputError: Says which, what it is, and what it must be.
    """
    hints = get_type_hints(type(placer))
    for field in fields(placer):
        value, kind = getattr(placer, field.name), hints[field.name]
        rule = ""
        if kind is int or (kind == (int | None) and value is not None):
            least = 0 if field.name in zero else 2 if field.name in even else 1
            rule = _count(value, least, field.name in even)
        elif kind is float:
            rule = _number(value, field.name in POSITIVE, field.name in SHARES)
        elif get_origin(kind) is Literal and value not in get_args(kind):
            rule = " or ".join(get_args(kind))
        if rule:
            raise InputError(f"{field.name} of placer {placer.name} must be {rule}, got {value!r}.")


def _count(value: Any, least: int, is_even: bool) -> str:
    """What a count must be, if it is not."""
    if isinstance(value, int | np.integer) and value >= least and not (is_even and value % 2):
        return ""
    return f"{'an even' if is_even else 'a whole'} number, at least {least}"


def _number(value: Any, is_positive: bool, is_share: bool) -> str:
    """What a number must be, if it is not."""
    if isinstance(value, int | float | np.number) and math.isfinite(value):
        above = value > 0 if is_positive else value >= 0
        if above and (value <= 1 or not is_share):
            return ""
    low = "more than 0" if is_positive else "0 or more"
    return f"a number, {low}{', 1 at most' if is_share else ''}"
