"""A placement: the device of every op, and priorities among ready ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Placement:
    """A device for every op, and optionally a priority or an order.

    Attributes:
        devices: Index of each op's device in `machine.devices`. int32, shape `[V]`. Views and
            read-only sources follow the ops they belong to; their entries are recomputed.
        priority: Among ready ops of one device the one with the largest value runs first, ties
            by op index. int64, shape `[V]`. None: length of the longest path to the end of the
            step under this placement (critical-path priority).
        order: Per device the indices of its ops, in order (no sources, no views): each op waits
            for its turn, even when the device is free. None: ready ops start by priority. On a
            device with several streams an order is only a priority.
    """

    devices: NDArray[np.int32]
    priority: NDArray[np.int64] | None = None
    order: tuple[tuple[int, ...], ...] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        same_rule = (self.priority is None) == (other.priority is None)
        return (
            same_rule
            and self.order == other.order
            and np.array_equal(self.devices, other.devices)
            and (
                self.priority is None
                or other.priority is None
                or np.array_equal(self.priority, other.priority)
            )
        )

    __hash__ = None  # type: ignore[assignment]
