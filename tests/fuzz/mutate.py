"""Damaged and odd files made from good ones; the same seed makes the same."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import Any

TOKENS = (
    *(b"-1", b"0", b"1e400", b"-1e400", b"NaN", b"Infinity", b"1e-320", b"0.5", b"null", b"true"),
    *(b"2000000000", b"9223372036854775807", b"18446744073709551616", b"9" * 30, b"9" * 5000),
    *(b"\xff\xfe", b"\x00", b"\x1b[31m", b"\xed\xa0\x80", b'"', b"{", b"[", b"]", b"}", b",", b"="),
    *(b"[" * 3000, b"\n", b"", b"x", "ä".encode()),
)
VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 10**9, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(0.5, -0.5, 1e-320, 1e308, 1e30, -1e30, float("inf"), float("nan")),
    *(None, True, False, "", "x", "\x1b[31m", "\ud800", "9" * 400, "inf", "1e999 GB", "-1 GB"),
    *([], {}, [[]], [0], {"": 0}, ["x"], [[[[]]]]),
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The file with some bytes changed, or, if it is JSON, some values."""
    if data[:1] in (b"{", b"[") and rng.random() < 0.6:
        try:
            return _other_values(json.loads(data), rng)
        except (ValueError, RecursionError):
            pass
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _change(found, rng)
    return bytes(found)


def _change(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    length = min(len(data) - at, rng.choice((1, 1, 2, 4, 16, 200)))
    kind = rng.randrange(7)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = rng.randrange(256)
    elif kind == 2:
        del data[at : at + length]
    elif kind == 3:
        data[at:at] = data[at : at + length] * rng.choice((1, 2, 50))
    elif kind == 4:
        data[at : at + length] = rng.choice(TOKENS)
    elif kind == 5:
        other = rng.randrange(len(data) + 1)
        data[at : at + length] = data[other : other + length]
    else:
        del data[at:]


def _other_values(tree: Any, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            break
        owner, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del owner[key]
        elif kind == 1:
            owner[key] = rng.choice([o[k] for o, k in places])
            break  # it may hold itself now
        elif kind == 2 and isinstance(owner, dict):
            owner[rng.choice(("", "x", "-1", "0", "\x1b[m", "1e9"))] = owner.pop(key)
        elif kind == 3 and isinstance(owner[key], int | float):
            with contextlib.suppress(OverflowError):  # whole, and too large for a float
                owner[key] = owner[key] * rng.choice((-1, 2, 10**6, 10**18, 0.1))
        else:
            owner[key] = copy.deepcopy(rng.choice(VALUES))  # later changes would stay in it
    try:
        return json.dumps(tree).encode(errors="surrogatepass")
    except (ValueError, RecursionError):  # it holds itself
        return b"{}"


def _places(tree: Any) -> Any:
    """Every value as its owner and key."""
    left = [tree]
    while left:
        item = left.pop()
        keys = item.keys() if isinstance(item, dict) else range(len(item))
        for key in keys:
            yield item, key
            if isinstance(item[key], dict | list):
                left.append(item[key])
