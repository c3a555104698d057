"""The best distinct placements of a search, to run beside the winner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Entry = tuple[int, I32, I64 | None, bool]
"""Step time, device of each task, priority of each task, whether devices keep to these and wait."""

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

    def offer(self, entry: Entry) -> None:
        """Keep a feasible placement if it is the fastest under its heading."""
        step_ns, devices, priority, in_turn = entry
        key = (self.heading, int(np.count_nonzero(np.bincount(devices))))
        known = self._best.get(key)
        if known is None or step_ns < known[0]:
            kept = None if priority is None else priority.copy()
            self._best[key] = (step_ns, devices.copy(), kept, in_turn)

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

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: plain lists and numbers."""
        found = [(*key, as_state(entry)) for key, entry in self._best.items()]
        return {"heading": self.heading, "best": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""
        self.heading = state["heading"]
        self._best = {(heading, n): from_state(entry) for heading, n, entry in state["best"]}


def as_state(entry: Entry) -> list[Any]:
    """An entry as plain lists and numbers."""
    step, devices, priority, in_turn = entry
    return [step, devices.tolist(), None if priority is None else priority.tolist(), in_turn]


def from_state(state: list[Any]) -> Entry:
    """From `as_state`."""
    step, devices, priority, *rest = state  # without the last from older checkpoints
    kept = None if priority is None else np.array(priority, np.int64)
    return int(step), np.array(devices, np.int32), kept, bool(rest and rest[0])
