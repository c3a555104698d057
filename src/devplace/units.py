"""Units: durations are integer nanoseconds, sizes integer bytes; text forms for people."""

from __future__ import annotations

import re
from numbers import Integral

from devplace.errors import InputError

NS_PER_S = 10**9
NS_PER_MS = 10**6
NS_PER_US = 10**3

SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
UNIT_NAMES = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
TIME_UNITS_NS = {"ns": 1, "us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S, "min": 60 * NS_PER_S}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"


def parse_size(value: int | str, what: str = "size") -> int:
    """Bytes of `value`: an integer, or a number with a unit (`20GiB` is binary, `20GB` decimal).

    Raises:
        InputError: Negative, not a number, or an unknown unit.

    Example:
        >>> parse_size("1.5 GiB"), parse_size("10gb"), parse_size(7)
        (1610612736, 10000000000, 7)
    """
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        raise InputError(f"{what} must be bytes or a text such as '20GiB', got {value!r}.")
    if isinstance(value, Integral):
        if value < 0:
            raise InputError(f"{what} must not be negative, got {value} bytes.")
        if value >= 2**63:
            raise InputError(f"{what} must be below 2^63 bytes.")
        return int(value)
    match = re.fullmatch(_NUMBER + r"([A-Za-z]*)\s*", value)
    unit = (match.group(2).upper() or "B") if match else ""
    if match is None or unit not in SIZE_UNITS:
        raise InputError(
            f"{what} must be a number with a unit, got {value!r}. "
            f"Use for example '20GiB', '20GB' or bytes; units: {', '.join(UNIT_NAMES)}."
        )
    num_bytes = float(match.group(1)) * SIZE_UNITS[unit]
    if num_bytes >= 2**63:
        raise InputError(f"{what} must be below 2^63 bytes, got {value!r}.")
    return round(num_bytes)


def parse_time_ns(value: int | str, what: str = "time") -> int:
    """Nanoseconds of `value`: an integer (ns), or a number with one of ns, us, ms, s, min.

    Raises:
        InputError: Negative, not a number, or an unknown unit.

    Example:
        >>> parse_time_ns("5us"), parse_time_ns("1.5 s"), parse_time_ns(12)
        (5000, 1500000000, 12)
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InputError(f"{what} must be ns or a text such as '5us', got {value!r}.")
    if isinstance(value, int):
        if value < 0:
            raise InputError(f"{what} must not be negative, got {value} ns.")
        if value >= 2**63:
            raise InputError(f"{what} must be below 2^63 ns.")
        return value
    match = re.fullmatch(_NUMBER + r"([a-z]+)\s*", value)
    if match is None or match.group(2) not in TIME_UNITS_NS:
        raise InputError(
            f"{what} must be a number with a unit, got {value!r}. Use for example '5us' or '30s'."
        )
    ns = float(match.group(1)) * TIME_UNITS_NS[match.group(2)]
    if ns >= 2**63:
        raise InputError(f"{what} must be below 2^63 ns, got {value!r}.")
    return round(ns)


def three_digits(value: float) -> str:
    """Three digits, or all before the point.

    Example:
        >>> three_digits(0.01234), three_digits(1204.3)
        ('0.0123', '1204')
    """
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def format_time(ns: int) -> str:
    """Short text of a duration.

    Example:
        >>> format_time(950), format_time(20_400_000), format_time(3_200_000_000)
        ('950 ns', '20.4 ms', '3.2 s')
    """
    for unit, scale in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US)):
        if abs(ns) >= scale:
            return f"{three_digits(ns / scale)} {unit}"
    return f"{ns} ns"


def format_bytes(num_bytes: int) -> str:
    """Short text of a size, in binary units, as memory is sold: a card of 24 GB has 24 GiB.

    Example:
        >>> format_bytes(512), format_bytes(11_500_000_000)
        ('512 B', '10.7 GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = SIZE_UNITS[unit.upper()]
        if abs(num_bytes) >= scale:
            return f"{three_digits(num_bytes / scale)} {unit}"
    return f"{num_bytes} B"


def format_bandwidth(bytes_per_s: int) -> str:
    """Short text of a bandwidth, in decimal units, as in data sheets.

    Example:
        >>> format_bandwidth(12_500_000_000)
        '12.5 GB/s'
    """
    for unit in ("TB", "GB", "MB", "KB"):
        if bytes_per_s >= SIZE_UNITS[unit]:
            return f"{three_digits(bytes_per_s / SIZE_UNITS[unit])} {unit}/s"
    return f"{bytes_per_s} B/s"
