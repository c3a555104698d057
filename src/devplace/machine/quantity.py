"""Numbers with units as machine files write them: `12 GB/s`, `5us`, `4.3 TFLOP/s`, `11 GiB`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from devplace.errors import MachineError
from devplace.units import SIZE_UNITS, TIME_UNITS_NS

_SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SIZE_NAMES = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
SIZES: Mapping[str, int] = {unit: SIZE_UNITS[unit.upper()] for unit in _SIZE_NAMES}
BANDWIDTHS: Mapping[str, int] = {f"{unit}/s": scale for unit, scale in SIZES.items()}
FLOP_RATES: Mapping[str, int] = {f"{unit}FLOP/s": scale for unit, scale in _SCALES.items()}
TIMES: Mapping[str, int] = {u: s for u, s in TIME_UNITS_NS.items() if u != "min"}
_TOO_LARGE = 2.0**63  # simulators count in int64
_TEXT = re.compile(r"\s*([+-]?[0-9][0-9_.]*(?:[eE][+-]?[0-9]+)?|[+-]?(?:nan|inf))\s*(.*?)\s*", re.I)


def parse_quantity(
    value: object, units: Mapping[str, int], what: str, *, positive: bool = True
) -> int:
    """The whole number of base units (the first of `units`) in `value`.

    Args:
        value: An integer in base units, or a text with a unit, such as `12 GB/s`.
        units: Unit -> base units; letters' case does not matter.
        what: The field, for messages.
        positive: Whether zero is refused.

    Raises:
        MachineError: Negative, zero, NaN, infinite, not a number, or an unknown unit.

    Example:
        >>> parse_quantity("1.5 GB/s", BANDWIDTHS, "bandwidth")
        1500000000
    """
    number, unit = _split(value, units, what)
    folded = {name.lower(): scale for name, scale in units.items()}
    scale = folded.get(unit.lower())
    if scale is None:
        raise MachineError(
            f"{what} has an unknown unit {unit!r} in {value!r}. Use one of {', '.join(units)}."
        )
    rule = "positive" if positive else "zero or more"
    if number * scale >= _TOO_LARGE:
        shown = _short(value if isinstance(value, str) else f"{value} {unit}")
        raise MachineError(f"{what} must be below 2^63 {next(iter(units))}, got {shown}.")
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        shown = value if isinstance(value, str) else f"{value} {unit}"
        raise MachineError(f"{what} must be {rule}, got {shown}. Measure it or set it.")
    exact = value * scale if isinstance(value, int) else round(number * scale)
    if positive and exact < 1:
        raise MachineError(f"{what} must be at least 1 {next(iter(units))}, got {value}.")
    return exact


def _split(value: object, units: Mapping[str, int], what: str) -> tuple[float, str]:
    base = next(iter(units))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value), base
        except OverflowError:  # an integer beyond all floats
            return math.inf if value > 0 else -math.inf, base
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    try:
        number = float(match.group(1)) if match else math.nan
    except ValueError:
        match = None
    if match is None:
        largest = list(units)[min(3, len(units) - 1)]
        raise MachineError(
            f"{what} must be a number with a unit, got {value!r}. "
            f"Use for example '12 {largest}', or a whole number of {base}."
        )
    if not match.group(2) and number:
        largest = list(units)[min(3, len(units) - 1)]
        raise MachineError(
            f"{what} is a text without a unit, {value!r}. Write '{match.group(1)} {largest}', or "
            f"the whole number of {base} without quotes."
        )
    return number, match.group(2) or base


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:36]}..."


def format_quantity(value: int, units: Mapping[str, int]) -> str | int:
    """The shortest text that `parse_quantity` reads back as exactly `value`, else `value` itself.

    Example:
        >>> format_quantity(12_500_000_000, BANDWIDTHS), format_quantity(1234567, TIMES)
        ('12.5 GB/s', 1234567)
    """
    for unit, scale in sorted(units.items(), key=lambda item: -item[1]):
        text = f"{value / scale:.6g}"
        short = len(text.replace(".", "")) <= 4 and "e" not in text
        if value >= scale and short and parse_quantity(f"{text} {unit}", units, "") == value:
            return f"{text} {unit}"
    return value
