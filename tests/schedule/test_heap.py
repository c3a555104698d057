"""Replay of torch's heaps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplace.schedule.heap import (
    BLOCK_BYTES,
    LARGE_PAGE_BYTES,
    MAX_SMALL_BYTES,
    SMALL_PAGE_BYTES,
    Heap,
    Piece,
    block_bytes,
)

MIB = 2**20
RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "data/heaps.json.gz").read_bytes()))


class SlowPiece:
    """The same by marking every unit as free or used."""

    def __init__(self, page: int, size: int) -> None:
        self.page = page
        self.used = [False] * (-(-size // page) * page)

    def holes(self) -> list[tuple[int, int]]:
        """(size, address) of all free ranges; the one at the end comes last."""
        found, start = [], None
        for address, used in enumerate([*self.used, True]):
            if used and start is not None:
                found.append((address - start, start))
            start = None if used else address if start is None else start
        return found

    def take(self, size: int) -> int:
        holes = self.holes()
        at_end = [hole for hole in holes if sum(hole) == len(self.used)]
        fitting = [hole for hole in holes if hole[0] >= size and hole not in at_end]
        if fitting:
            address = min(fitting)[1]
        else:
            free, address = at_end[0] if at_end else (0, len(self.used))
            if free < size:
                self.used += [False] * (-(-(self.page - free) // self.page) * self.page)
        self.used[address : address + size] = [True] * size
        return address

    def give(self, address: int, size: int) -> None:
        self.used[address : address + size] = [False] * size


def test_the_smallest_hole_that_fits_is_filled() -> None:
    """Of holes of 30 and 20, a block of 15 takes the one of 20, and its rest is a hole of 5."""
    piece = Piece(100)
    a, wall, b, end = (piece.take(size) for size in (30, 10, 20, 10))
    assert (a, wall, b, end) == (0, 30, 40, 60)
    piece.give(a, 30)
    piece.give(b, 20)
    assert piece.take(15) == 40
    assert piece.take(5) == 55
    assert piece.take(30) == 0
    assert piece.num_bytes == 100


def test_holes_side_by_side_are_one() -> None:
    """Three neighbours of 20, given back in any order, hold a block of 60."""
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)):
        piece = Piece(100)
        blocks = [piece.take(20) for _ in range(3)]
        assert piece.take(40) == 60
        for index in order:
            piece.give(blocks[index], 20)
        assert piece.take(60) == 0
        assert piece.num_bytes == 100


def test_what_fits_no_hole_makes_the_piece_grow_by_pages() -> None:
    """A hole of 60 is no use to a block of 70: it goes to the end, for which one page is added."""
    piece = Piece(100)
    first = piece.take(60)
    assert piece.take(30) == 60
    piece.give(first, 60)
    assert piece.take(70) == 90
    assert piece.num_bytes == 200


def test_the_free_end_is_used_last() -> None:
    """A hole that is larger than the free end is preferred, as the end could grow."""
    piece = Piece(100)
    first = piece.take(50)
    assert piece.take(40) == 50
    piece.give(first, 50)
    assert piece.take(8) == 0
    assert piece.num_bytes == 100


def test_small_and_large_tensors_lie_apart() -> None:
    """1 MiB is small, a byte more is large; each class grows by its own pages."""
    heap = Heap()
    small = heap.take(MAX_SMALL_BYTES)
    assert heap.num_bytes == SMALL_PAGE_BYTES
    large = heap.take(MAX_SMALL_BYTES + 1)
    assert heap.num_bytes == SMALL_PAGE_BYTES + LARGE_PAGE_BYTES
    assert (small.is_small, large.is_small) == (True, False)
    heap.give(small)
    heap.give(large)
    heap.take(30 * MIB)
    assert heap.num_bytes == SMALL_PAGE_BYTES + 2 * LARGE_PAGE_BYTES
    assert heap.large_peak_bytes == 30 * MIB


@pytest.mark.parametrize(("num_bytes", "block"), [(1, 512), (512, 512), (513, 1024)])
def test_tensors_take_whole_blocks(num_bytes: int, block: int) -> None:
    """Sizes are rounded up to 512 bytes."""
    assert block_bytes(num_bytes) == block


@given(seed=st.integers(0, 2**32 - 1), page=st.integers(8, 60), begin=st.integers(0, 100))
def test_replay_equals_an_obvious_one(seed: int, page: int, begin: int) -> None:
    """Addresses and sizes are those of a replay that marks every unit."""
    rng = np.random.default_rng(seed)
    fast, slow = Piece(page, begin), SlowPiece(page, begin)
    lying: list[tuple[int, int]] = []
    for _ in range(80):
        if lying and rng.random() < 0.45:
            block = lying.pop(int(rng.integers(len(lying))))
            fast.give(*block)
            slow.give(*block)
            continue
        size = int(rng.integers(1, page + 1))
        address = fast.take(size)
        assert address == slow.take(size)
        lying.append((address, size))
    assert fast.num_bytes == len(slow.used)


@pytest.mark.parametrize("record", RECORDED["heaps"], ids=lambda r: f"{r['step']} {r['kind']}")
def test_recorded_heaps_are_reproduced(record: dict[str, Any]) -> None:
    """What H200s took and gave back while steps were captured makes the heaps they had."""
    piece = Piece(SMALL_PAGE_BYTES if record["kind"] == "small" else LARGE_PAGE_BYTES)
    lying: list[tuple[int, int]] = []
    for event in record["events"]:
        if event > 0:
            lying.append((piece.take(event * BLOCK_BYTES), event * BLOCK_BYTES))
        else:
            piece.give(*lying[-1 - event])
    assert piece.num_bytes == record["reserved_bytes"]
