"""Which ops a pattern names, as in pins."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping

from devplace.graph.graph import Member, Op


def matches(pattern: str, op: Op) -> bool:
    """Whether a pin pattern names this op: by its module path, a path above it, or its name;
    a fused op if it names a member.

    Example:
        >>> op = Op(name="mm_3", target="aten.mm.default", module="encoder.layers.0.fc")
        >>> [matches(p, op) for p in ("encoder", "encoder.*", "enc", "*.fc", "mm_3", "")]
        [True, True, False, True, True, True]
    """
    return _names(pattern, op) or any(_names(pattern, member) for member in op.members)


def _names(pattern: str, op: Op | Member) -> bool:
    if pattern in ("", op.name) or fnmatch.fnmatchcase(op.name, pattern):
        return True
    path = op.module
    while path:
        if path == pattern or fnmatch.fnmatchcase(path, pattern):
            return True
        path = path.rpartition(".")[0]
    return False


def pinned_part(pins: Mapping[str, str]) -> Callable[[Op], str | None]:
    """Keys for `fuse` that keep ops apart which pins send to different devices, or to none.

    Args:
        pins: Pattern -> device name; the first one that names an op counts.
    """

    def part(op: Op) -> str | None:
        if not pins:
            return None
        return next((pins[pattern] for pattern in pins if matches(pattern, op)), "")

    return part
