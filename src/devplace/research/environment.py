"""Cost of a placement of groups: counted, simulated or measured; shared by all systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.grouping import Grouping

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What some placements gave.

    Attributes:
        step_ns: Step times. int64 `[B]`
        overflow_bytes: Bytes over the limits; 0 when it fits and ran. int64 `[B]`
    """

    step_ns: I64
    overflow_bytes: I64

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Which broke a limit, or did not run. `[B]`"""
        return self.overflow_bytes > 0


def nothing_to_place(problem: Problem) -> str:
    """Why no policy can learn here; empty if one can."""
    if problem.core.tasks.num_tasks:
        return ""
    return "the graph has sources and views only, so there is no op to learn a device for"


class Environment:
    """Scores placements of groups on the usable devices. An action is an index into `devices`.

    Actions that a group may not take (pins, missing kernels) are scored as if the members concerned
    were on their fastest allowed device; a policy can avoid them with `allowed`.

    Args:
        evaluate: The counted evaluator; what it measures is what is scored.
        grouping: Groups that are placed.

    Attributes:
        devices: Machine index of each action. int32 `[A]`
        allowed: Actions each group may take. bool `[M, A]`
        best_key: Overflow and step time of the best so far.
        best_actions: Its actions. int32 `[M]`
        is_cut: Whether the budget allowed fewer placements than were wanted once.
    """

    def __init__(self, evaluate: Evaluator, grouping: Grouping) -> None:
        self.evaluate, self.grouping = evaluate, grouping
        self.problem = grouping.problem
        self.devices: I32 = np.array(self.problem.usable_devices, np.int32)
        self.allowed = np.ascontiguousarray(grouping.allowed[:, self.devices])
        self.best_key: tuple[int, int] | None = None
        self.best_actions = np.zeros(grouping.num_groups, np.int32)
        self.is_cut = False

    @property
    def num_groups(self) -> int:
        """Groups to place."""
        return self.grouping.num_groups

    @property
    def num_actions(self) -> int:
        """Devices to choose from."""
        return len(self.devices)

    @property
    def limit_bytes(self) -> int:
        """Memory limits of the usable devices, summed."""
        return sum(self.problem.limit_bytes[d] for d in self.devices)

    def room(self, wanted: int) -> int:
        """How many of `wanted` placements the budget still allows; 0 when it is spent."""
        left = 0 if self.evaluate.exhausted else self.evaluate.meter.left(wanted)
        self.is_cut |= left < wanted
        return left

    def __call__(self, actions: NDArray[np.integer]) -> Outcome:
        """Score placements; ask `room` before how many there may be.

        Seconds that ran out since then do not matter: what was drawn is scored.

        Args:
            actions: `[B, M]`
        """
        if actions.ndim != 2 or actions.shape[1] != self.num_groups:
            raise ValueError(f"actions must be [B, {self.num_groups}], got {actions.shape}")
        if self.evaluate.meter.left(len(actions)) < len(actions):
            raise ValueError("more placements than the budget allows: ask room() first")
        step, overflow = self.evaluate.batch(self.task_devices(actions))
        row = int(np.lexsort((step, overflow))[0])
        key = (int(overflow[row]), int(step[row]))
        if self.best_key is None or key < self.best_key:
            self.best_key, self.best_actions = key, actions[row].astype(np.int32)
        return Outcome(step, overflow)

    def task_devices(self, actions: NDArray[np.integer]) -> I32:
        """Device of each task. `[B, M]` -> int32 `[B, N]`"""
        groups = self.grouping.colocation_devices(self.devices[actions])
        return self.problem.spaces.tasks_from_groups(groups).astype(np.int32)

    def placement(self, actions: NDArray[np.integer]) -> Placement:
        """Placement of one row of actions. `[M]`"""
        return Placement(self.problem.spaces.op_devices(self.task_devices(actions[None, :])[0]))

    def best(self) -> Placement:
        """The best placement scored: one that fits if there was one, else the nearest to it."""
        return self.evaluate.history.best or self.placement(self.best_actions)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"key": self.best_key, "actions": self.best_actions.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""
        key = state["key"]
        self.best_key = None if key is None else (int(key[0]), int(key[1]))
        self.best_actions = np.array(state["actions"], np.int32)
