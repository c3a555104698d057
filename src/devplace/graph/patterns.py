"""Match ops against name patterns, as in pins."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import NamedTuple

from devplace.graph.graph import Member, Op


def matches(pattern: str, op: Op) -> bool:
    """Whether a pin pattern names this op: by its module path, a path above it, or its name;
    a fused op if it names a member.

    Example:
        >>> op = Op(name="mm_3", target="aten.mm.default", module="encoder.layers.0.fc")
        >>> [matches(p, op) for p in ("encoder", "encoder.*", "enc", "*.fc", "mm_3", "")]
        [True, True, False, True, True, True]
    """
    bound = (member for member in op.members if member.is_bound)
    return names(pattern, op) or any(names(pattern, member) for member in bound)


def names(pattern: str, op: Op | Member) -> bool:
    """Whether a pattern names an op or a member itself."""
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


class Cut(NamedTuple):
    """Two members of a fused op that pins part.

    Attributes:
        pattern: The pin of the first.
        inside: A member that it names.
        outside: One that goes elsewhere, or anywhere.
        other: The pin of the second, None if no pin names it.
    """

    pattern: str
    inside: Op | Member
    outside: Op | Member
    other: str | None


def cut_by(op: Op, pins: Mapping[str, Hashable]) -> Cut | None:
    """How pins part the members of a fused op; None if they do not, or it is none.

    Args:
        op: The op.
        pins: Pattern -> device; the first one that names a member, or the op, counts.
    """
    found = deciding(op, pins) if op.members and pins else []
    for pattern, inside in found:
        if pattern is None:
            continue
        for other, outside in found:
            if other is None or pins[other] != pins[pattern]:
                return Cut(pattern, inside, outside, other)
        return None
    return None


def deciding(op: Op, patterns: Collection[str]) -> list[tuple[str | None, Op | Member]]:
    """The first pattern that names each thing an op computes, None where none does.

    Args:
        op: The op; of a fused one its members count, but those that pins do not bind.
        patterns: Patterns, the first that names something counts; one that names a fused op names
            all its members.
    """
    bound: list[Op | Member] = [m for m in op.members if m.is_bound] or [op]
    wholly = {pattern for pattern in patterns if fnmatch.fnmatchcase(op.name, pattern)}
    return [
        (next((p for p in patterns if p in wholly or names(p, one)), None), one) for one in bound
    ]
