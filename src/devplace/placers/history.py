"""The best placement of a run, and when it got better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from devplace.placers.budget import Meter
from devplace.placers.runners_up import Entry, RunnersUp, as_state, from_state
from devplace.placers.turns import placed_in_turn
from devplace.problem import Placement, Problem


class History:
    """Remembers the best feasible placement, and tells others of all that it is offered.

    Attributes:
        points: (evaluations, seconds, step_ns) whenever a better one was found.
        runners_up: Good placements of other kinds; placers set its `heading`.
        observers: Called with every entry offered, better or not.
    """

    def __init__(self, problem: Problem, meter: Meter) -> None:
        self._problem, self._meter = problem, meter
        self.points: list[tuple[int, float, int]] = []
        self.runners_up = RunnersUp()
        self.observers: list[Callable[[Entry], None]] = [self.runners_up.offer]
        self._best: Entry | None = None
        self._ordered: Placement | None = None  # the best, if it has an order of its own

    @property
    def best_ns(self) -> int | None:
        """Step time of the best; None if nothing fitted."""
        return None if self._best is None else self._best[0]

    @property
    def best(self) -> Placement | None:
        """The best; None if nothing fitted."""
        if self._best is None or self._ordered is not None:
            return self._ordered
        return placement_of(self._problem, self._best)

    def next_best(self, most: int) -> tuple[Placement, ...]:
        """The best placements that are not `best` and differ from each other in kind."""
        found = self.runners_up.distinct(self._best, most)
        return tuple(placement_of(self._problem, entry) for entry in found)

    def offer(self, entry: Entry, ordered: Placement | None = None) -> None:
        """A feasible placement that was counted just now.

        Args:
            entry: Its arrays are copied if they are kept.
            ordered: The placement, if it has an order of its own. Observers are told of entries,
                which say no order, so not of these.
        """
        if ordered is None:
            for observe in self.observers:
                observe(entry)
        step, devices, priority, in_turn = entry
        if self._best is not None and step >= self._best[0]:
            return
        kept = None if priority is None else priority.copy()
        self._best, self._ordered = (step, devices.copy(), kept, in_turn), ordered
        self.points.append((self._meter.num_evaluations, self._meter.seconds, step))

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: plain lists and numbers."""
        return {
            "history": list(self.points),
            "best": None if self._best is None else as_state(self._best),
            "order": None if self._ordered is None else _order_as_state(self._ordered),
            "runners_up": self.runners_up.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`, of the same problem."""
        self.points = [(int(n), float(s), int(step)) for n, s, step in state["history"]]
        self._best = None if state["best"] is None else from_state(state["best"])
        self._ordered = None
        if self._best is not None and state.get("order") is not None:
            priority, rows = state["order"]
            of_op = None if priority is None else np.array(priority, np.int64)
            order = tuple(tuple(row) for row in rows)
            self._ordered = Placement(self._problem.spaces.op_devices(self._best[1]), of_op, order)
        self.runners_up.load_state_dict(state["runners_up"])


def placement_of(problem: Problem, entry: Entry) -> Placement:
    """The placement of ops that an entry stands for."""
    _, device, priority, in_turn = entry
    if in_turn and priority is not None:
        return placed_in_turn(problem, device, priority)
    of_op = None if priority is None else problem.spaces.ops_from_tasks(priority)
    return Placement(problem.spaces.op_devices(device), of_op)


def _order_as_state(placement: Placement) -> list[Any]:
    assert placement.order is not None
    priority = None if placement.priority is None else placement.priority.tolist()
    return [priority, [list(row) for row in placement.order]]
