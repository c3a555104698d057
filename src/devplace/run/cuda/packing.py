"""Pack many small tensors into one allocation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from devplace.schedule.heap import BLOCK_BYTES


class Packing:
    """Where tensors lie in one piece of memory.

    Args:
        sizes: Key -> bytes of its tensor.
        alignment: Places begin at multiples of this, bytes; by default as torch's allocations do.

    Attributes:
        num_bytes: Size of the whole.

    Example:
        >>> Packing({4: 100, 7: 600, 9: 0}).num_bytes
        1536
    """

    def __init__(self, sizes: Mapping[int, int], alignment: int = BLOCK_BYTES) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        at = 0
        for key, size in sizes.items():
            room = -(-size // alignment) * alignment
            self._places[key] = (at, room)
            at += room
        self.num_bytes = at

    def cut(self, memory: Any, key: int, like: Any) -> Any | None:
        """The tensor of a key, with shape, strides and dtype of another one.

        Args:
            memory: uint8 `[num_bytes]`, or None.
            key: Which one.
            like: Tensor on any device.

        Returns:
            None if it is empty, has no place or does not fit there.
        """
        at, room = self._places.get(key, (0, 0))
        size = num_span_bytes(like)
        if memory is None or not 0 < size <= room:
            return None
        return shaped(memory[at : at + size], like)


def shaped(memory: Any, like: Any) -> Any:
    """Bytes seen as a tensor laid out like another one."""
    words = memory.view(like.dtype)
    return words.as_strided(like.shape, like.stride(), words.storage_offset())


def num_span_elements(tensor: Any) -> int:
    """Elements of storage from the first to the last one of a tensor, gaps counted."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum(int(size - 1) * int(stride) for size, stride in pairs)


def num_span_bytes(tensor: Any) -> int:
    """Bytes of storage from the first to the last element of a tensor, gaps counted."""
    return num_span_elements(tensor) * int(tensor.element_size())
