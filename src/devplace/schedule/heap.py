"""How much of a GPU torch reserves for the tensors of a step, gaps between them included.

Torch gives out memory in whole blocks of 512 bytes, tensors up to 1 MiB from one piece of memory
and larger ones from another. A tensor lies in the smallest hole that holds it, else at the end of
its piece, which grows by pages; holes side by side are one. So a piece is larger than what lies in
it at once, and the two are fullest at different times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# Of torch's CUDACachingAllocator, with expandable segments.
BLOCK_BYTES = 512
MAX_SMALL_BYTES = 2**20
SMALL_PAGE_BYTES = 2 * 2**20
LARGE_PAGE_BYTES = 20 * 2**20
# Larger tensors make their piece grow by what they need, smaller ones by a page.
MIN_OWN_BYTES = 10 * 2**20
OWN_STEP_BYTES = 2 * 2**20


def block_bytes(num_bytes: int) -> int:
    """What a tensor takes: whole blocks, at least one."""
    return max(BLOCK_BYTES, _ceil(num_bytes, BLOCK_BYTES))


class Piece:
    """Memory that grows by pages, given out best fit.

    Args:
        page_bytes: It grows by whole pages.
        num_bytes: Size to begin with; made whole pages.

    Attributes:
        num_bytes: Its size; it never shrinks.
    """

    def __init__(self, page_bytes: int, num_bytes: int = 0) -> None:
        self.num_bytes = _ceil(num_bytes, page_bytes)
        self._page_bytes = page_bytes
        self._used_to = 0  # from here on all is free
        self._by_size: list[tuple[int, int]] = []  # holes below: (size, address)
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # end of a hole -> its address

    def take(self, size: int) -> int:
        """Address of a new block.

        Args:
            size: Of `block_bytes`.

        Complexity: O(log H) comparisons for H holes, and a move of at most H list items.
        """
        found = bisect_left(self._by_size, (size, -1))
        if found == len(self._by_size):
            return self._take_at_end(size)
        hole, address = self._by_size[found]
        self._remove(address, hole)
        if hole > size:
            self._add(address + size, hole - size)
        return address

    def give(self, address: int, size: int) -> None:
        """Free a block that `take` gave."""
        before = self._start_of.get(address)
        if before is not None:
            self._remove(before, address - before)
            address, size = before, size + address - before
        behind = self._size_at.get(address + size)
        if behind is not None:
            self._remove(address + size, behind)
            size += behind
        if address + size == self._used_to:
            self._used_to = address
        else:
            self._add(address, size)

    def _take_at_end(self, size: int) -> int:
        free = self.num_bytes - self._used_to
        if free < size:
            self.num_bytes += _ceil(self._wanted(size) - free, self._page_bytes)
        address = self._used_to
        self._used_to += size
        return address

    def _wanted(self, size: int) -> int:
        """What must be free at the end once the piece has grown for a tensor."""
        return _ceil(size, OWN_STEP_BYTES) if size >= MIN_OWN_BYTES else max(size, self._page_bytes)

    def _add(self, address: int, size: int) -> None:
        insort(self._by_size, (size, address))
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _remove(self, address: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, address))]
        del self._size_at[address], self._start_of[address + size]


class HeapBlock(NamedTuple):
    """Memory of one tensor."""

    is_small: bool
    address: int
    size: int


class HeapTally:
    """How much small and large tensors take at once, wherever they lie.

    Attributes:
        peak_bytes: The most that all tensors took at once.
        large_peak_bytes: The most that large tensors took at once.
    """

    def __init__(self) -> None:
        self._now = self._large_now = 0
        self.peak_bytes = self.large_peak_bytes = 0

    def take(self, num_bytes: int) -> HeapBlock:
        """Memory for a tensor."""
        size = block_bytes(num_bytes)
        self._now += size
        if self._now > self.peak_bytes:
            self.peak_bytes = self._now
        if size <= MAX_SMALL_BYTES:
            return HeapBlock(True, 0, size)
        self._large_now += size
        if self._large_now > self.large_peak_bytes:
            self.large_peak_bytes = self._large_now
        return HeapBlock(False, 0, size)

    def give(self, block: HeapBlock) -> None:
        """Free it."""
        self._now -= block.size
        if not block.is_small:
            self._large_now -= block.size


class Heap(HeapTally):
    """The two pieces that a GPU's tensors come from.

    Args:
        large_bytes: Size of the piece for large tensors to begin with.
        small_page_bytes, large_page_bytes: What the pieces grow by; as torch's by default.

    Attributes:
        small, large: The pieces.
    """

    def __init__(
        self,
        large_bytes: int = 0,
        small_page_bytes: int = SMALL_PAGE_BYTES,
        large_page_bytes: int = LARGE_PAGE_BYTES,
    ) -> None:
        super().__init__()
        self.small = Piece(small_page_bytes)
        self.large = Piece(large_page_bytes, large_bytes)

    @property
    def num_bytes(self) -> int:
        """What both pieces reserve."""
        return self.small.num_bytes + self.large.num_bytes

    def take(self, num_bytes: int) -> HeapBlock:
        """Memory for a tensor."""
        is_small, _, size = super().take(num_bytes)
        return HeapBlock(is_small, (self.small if is_small else self.large).take(size), size)

    def give(self, block: HeapBlock) -> None:
        """Free it."""
        super().give(block)
        (self.small if block.is_small else self.large).give(block.address, block.size)


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit) * unit
