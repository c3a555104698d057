"""The best few placements of a search that differ in kind, for running them beside the winner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Entry = tuple[int, I32, I64 | None]
"""Step time, device of each task, priority of each task."""

SAME_SHARE = 0.01
"""Placements that differ in at most this part of the tasks count as one."""


class RunnersUp:
    """The fastest feasible placement under each heading.

    A heading is the part of the search that found it and the number of devices in use. Neighbours
    of the winner would say nothing new; another part of the search, or fewer devices, may turn out
    faster where predictions are off.

    Attributes:
        heading: The part of the search at work; set by the placer.
    """

    def __init__(self) -> None:
        self.heading = ""
        self._best: dict[tuple[str, int], Entry] = {}

    def offer(self, step_ns: int, devices: I32, priority: I64 | None) -> None:
        """Keep a feasible placement if it is the fastest under its heading."""
        key = (self.heading, int(np.count_nonzero(np.bincount(devices))))
        known = self._best.get(key)
        if known is None or step_ns < known[0]:
            kept = None if priority is None else priority.copy()
            self._best[key] = (step_ns, devices.copy(), kept)

    def distinct(self, best: Entry | None, most: int) -> Iterator[Entry]:
        """At most `most` entries, fastest first, that differ from `best` and from each other."""
        taken = [] if best is None else [best[1]]
        count = 0
        for entry in sorted(self._best.values(), key=lambda entry: entry[0]):
            if count == most:
                return
            if all(
                np.count_nonzero(entry[1] != other) > SAME_SHARE * len(other) for other in taken
            ):
                taken.append(entry[1])
                count += 1
                yield entry
