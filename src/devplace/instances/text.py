"""Read and validate other people's files; errors name file, place, value and next step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import msgspec

from devplace.errors import InputError
from devplace.files import read_whole

T = TypeVar("T")
LARGEST, LEAST = 10**30, 1e-30
MAX_DEVICES = 10**6
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number of a file: JSON has no largest one, floats and our arrays have."""


def read_text(path: str | Path) -> str:
    """The file as text.

    Raises:
        InputError: Missing, a folder, larger than 1 GB, or not UTF-8.
    """
    file = Path(path)
    try:
        if file.is_dir():
            raise InputError(f"{path} is a folder. Name a file, or a suite with the folder.")
        data = read_whole(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"Cannot read {path}: {reason}. Check the path.") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text: byte {error.start} is {data[error.start]:#04x}. "
            f"Give a JSON or text file of a published instance."
        ) from error


def decode(text: str, kind: type[T], path: str, what: str) -> T:
    """JSON text as a record.

    Raises:
        InputError: Not JSON, or a field is missing or of another type; names line or key.
    """
    try:
        return msgspec.json.decode(text.encode(), type=kind)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{path} is not a whole {what} file: {error}. Compare with a published one."
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(
            f"{path} is not JSON: {error}{_line(text, str(error))}. Fetch the file again."
        ) from error


def _line(text: str, error: str) -> str:
    """` (line 3)` of the byte that a decode error names."""
    digits = error.rpartition("(byte ")[2].rstrip(")")
    if not digits.isdigit():
        return f" (line {text.count(chr(10)) + 1})"
    return f" (line {text.encode()[: int(digits)].count(10) + 1})"


def fail(path: str, where: str, problem: str, remedy: str = "Correct the file.") -> NoReturn:
    """Raise the error for a value of a file.

    Raises:
        InputError: Always.
    """
    raise InputError(f"{path}: {where}: {problem}. {remedy}")


def not_negative(path: str, where: str, value: float) -> float:
    """The value, if it is 0 or a number whose sums and quotients stay within what floats hold.

    Raises:
        InputError: It is not.
    """
    if not 0 <= value < LARGEST:
        shown = value if isinstance(value, float) else f"{str(value)[:12]}..."
        fail(path, where, f"must be a number from 0 to {LARGEST:.0e}, got {shown}")
    if 0 < value < LEAST:
        fail(path, where, f"must be 0 or at least {LEAST:.0e}, got {value}")
    return value


def at_most_devices(path: str, where: str, count: int) -> int:
    """The number of devices, if it is from 0 to a million.

    Raises:
        InputError: It is not.
    """
    if not 0 <= count <= MAX_DEVICES:
        fail(path, where, f"must be from 0 to {MAX_DEVICES} devices, got {str(count)[:12]}")
    return count


def check_acyclic(
    path: str, names: Sequence[str], edges: Iterable[tuple[int, int]]
) -> tuple[int, ...]:
    """A topological order of the nodes, smaller indices first.

    Raises:
        InputError: The edges have a cycle; names one node on it.
    """
    import heapq

    readers: list[list[int]] = [[] for _ in names]
    missing = [0] * len(names)
    for producer, consumer in edges:
        readers[producer].append(consumer)
        missing[consumer] += 1
    ready = [node for node, count in enumerate(missing) if not count]
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(names):
        left = {node for node, count in enumerate(missing) if count}
        fail(path, "edges", f"node {names[_on_cycle(readers, left)]} is on a cycle")
    return tuple(order)


def _on_cycle(readers: Sequence[Sequence[int]], left: set[int]) -> int:
    """A node on a cycle among those that could not be ordered: walk back until one repeats."""
    writers: dict[int, int] = {r: node for node in left for r in readers[node] if r in left}
    node, seen = min(left), set[int]()
    while node not in seen:
        seen.add(node)
        node = writers[node]
    return node
