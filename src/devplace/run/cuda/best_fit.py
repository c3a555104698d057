"""How far a stretch of memory must reach for tensors that come and go, gaps counted."""

from __future__ import annotations

from bisect import bisect_left, insort


class Stretch:
    """Places chosen as torch's allocator does: the smallest gap that fits, else at the end.

    Args:
        least_rest: What is left of a gap is a gap again if it is larger than this, bytes.

    Attributes:
        num_bytes: How far it has reached.

    Example:
        >>> stretch = Stretch()
        >>> for key in range(3):
        ...     stretch.take(key, 512)
        >>> stretch.give(1)
        >>> stretch.take(3, 1024)  # the gap is too small
        >>> stretch.num_bytes
        2560
    """

    def __init__(self, least_rest: int = 0) -> None:
        self.num_bytes = 0
        self._least_rest = least_rest
        self._places: dict[int, tuple[int, int]] = {}
        self._gaps: list[tuple[int, int]] = []  # (bytes, begin), ascending
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def take(self, key: int, num_bytes: int) -> None:
        """Find a place for a tensor; no key may have two.

        Complexity: O(G) for G gaps.
        """
        at = bisect_left(self._gaps, (num_bytes, 0))
        if at < len(self._gaps):
            room, begin = self._gaps[at]
            self._remove(begin)
            if room - num_bytes > self._least_rest:
                self._add(begin + num_bytes, room - num_bytes)
            else:
                num_bytes = room
        else:
            begin = self._ends.get(self.num_bytes, self.num_bytes)
            if begin < self.num_bytes:  # the gap at the end grows
                self._remove(begin)
            self.num_bytes = begin + num_bytes
        self._places[key] = (begin, num_bytes)

    def give(self, key: int) -> None:
        """A tensor has gone; its place joins the gaps beside it.

        Complexity: O(G) for G gaps.
        """
        begin, num_bytes = self._places.pop(key)
        end = begin + num_bytes
        if begin in self._ends:
            begin = self._ends[begin]
            self._remove(begin)
        if end in self._begins:
            end += self._remove(end)
        self._add(begin, end - begin)

    def _add(self, begin: int, num_bytes: int) -> None:
        self._begins[begin] = num_bytes
        self._ends[begin + num_bytes] = begin
        insort(self._gaps, (num_bytes, begin))

    def _remove(self, begin: int) -> int:
        num_bytes = self._begins.pop(begin)
        del self._ends[begin + num_bytes]
        del self._gaps[bisect_left(self._gaps, (num_bytes, begin))]
        return num_bytes
