"""Placement as a `gymnasium` environment, for agents from elsewhere: `pip install 'devplace[gym]'`.

An episode is one placement. With `episode="op"` every colocation group is placed in turn, with
`"group"` groups of them (`grouping.colocated`, at most `groups`), with `"whole"` one action gives
the devices of all groups. Each end of an episode is one counted evaluation.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from devplace.errors import InputError
from devplace.placers.counted_simulator import Evaluator
from devplace.research.environment import Environment, Outcome, nothing_to_place
from devplace.research.features import (
    device_features,
    group_bytes,
    group_costs,
    group_edges,
    op_types,
)
from devplace.research.grouping import colocated, colocation
from devplace.research.penalties import failing_signal, sqrt_reward

try:
    import gymnasium
    from gymnasium import spaces
except ImportError as error:
    raise InputError(
        "The environment for outside agents needs gymnasium: pip install 'devplace[gym]'."
    ) from error

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Reward = Callable[[Outcome], F64]


def default_reward(outcome: Outcome) -> F64:
    """Minus the square root of step seconds; 100 s for what failed, as in HDP. `[B]`"""
    return sqrt_reward(failing_signal(outcome, 100.0))


class PlacementEnv(gymnasium.Env[dict[str, Any], Any]):
    """Places groups on the usable devices of a problem; the reward comes with the last of them.

    An action is an index into `devices`, or with whole placements one such index per group. One
    that the group may not take (see `mask`) counts as the fastest allowed device.

    Observations, in which `M` is groups and `A` devices:

    - `features`: row of `table` of the group to be placed `[F]`; the whole table with whole
      placements;
    - `placed` `[M]`: device of each group placed so far, A for the others;
    - `turn`: the group to be placed (0 with whole placements);
    - `mask`: allowed devices, `[A]` of this group, or `[M, A]`.

    After the last action `info` has `step_ns`, `overflow_bytes` and `is_feasible`. When the budget
    is spent an episode ends truncated, with reward 0 and without these.

    Args:
        evaluate: The counted evaluator; with `measure`, rewards are measured.
        episode: `op`, `group` or `whole`.
        groups: Most groups, but with `op`.
        reward: From outcomes to rewards `[B]`, higher is better.

    Attributes:
        problem: What is placed.
        devices: Machine index of each action. int32 `[A]`
        grouping: Groups that are placed.
        table: What is known of each group, see `group_table`. `[M, F]`
        device_table: What is known of each device, see `features.device_features`. `[A, 4]`
        edges: Which group reads from which, int64 `[2, E]`, and the bytes: `edge_bytes` `[E]`.

    Raises:
        InputError: No such kind of episode, no group, or nothing to place.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        episode: Literal["op", "group", "whole"] = "group",
        groups: int = 64,
        reward: Reward = default_reward,
    ) -> None:
        if episode not in ("op", "group", "whole"):
            raise InputError(f"An episode must be op, group or whole, got {episode!r}.")
        if groups < 1:
            raise InputError(f"groups must be at least 1, got {groups}.")
        if reason := nothing_to_place(evaluate.problem):
            raise InputError(f"An agent cannot place this: {reason}.")
        self.problem = evaluate.problem
        self.grouping = (
            colocation(self.problem) if episode == "op" else colocated(self.problem, groups)
        )
        self.environment = Environment(evaluate, self.grouping)
        self.devices = self.environment.devices
        self.edges, self.edge_bytes = group_edges(self.grouping)
        self._reward, self._is_whole = reward, episode == "whole"
        self.table = group_table(self.environment)
        self.device_table = device_features(self.problem)
        self._placed = np.full(self.environment.num_groups, self.environment.num_actions, np.int64)
        self._turn = 0
        self.action_space, self.observation_space = self._spaces()

    def _spaces(self) -> tuple[Any, Any]:
        groups, actions = self.environment.num_groups, self.environment.num_actions
        one = spaces.Discrete(actions)
        whole = spaces.MultiDiscrete(np.full(groups, actions))
        seen = {
            "features": spaces.Box(0.0, 1.0, self._seen(self.table).shape, np.float32),
            "placed": spaces.MultiDiscrete(np.full(groups, actions + 1)),
            "turn": spaces.Discrete(groups),
            "mask": spaces.MultiBinary((groups, actions) if self._is_whole else actions),
        }
        return (whole if self._is_whole else one), spaces.Dict(seen)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Nothing is placed; there is nothing random."""
        super().reset(seed=seed)
        self._placed = np.full_like(self._placed, self.environment.num_actions)
        self._turn = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Place the group whose turn it is, or all.

        Raises:
            InputError: The episode is over, or no such device.
        """
        if self._turn >= len(self._placed):
            raise InputError("This episode is over: call reset() before the next step().")
        chosen = self._checked(action)
        if self._is_whole:
            self._placed = chosen
            self._turn = len(self._placed)
        else:
            self._placed = self._placed.copy()
            self._placed[self._turn] = chosen
            self._turn += 1
        if self._turn < len(self._placed):
            return self._observation(), 0.0, False, False, {}
        if not self.environment.room(1):
            return self._observation(), 0.0, False, True, {}
        outcome = self.environment(self._placed[None])
        info = {
            "step_ns": int(outcome.step_ns[0]),
            "overflow_bytes": int(outcome.overflow_bytes[0]),
            "is_feasible": not bool(outcome.failed[0]),
        }
        return self._observation(), float(self._reward(outcome)[0]), True, False, info

    def _checked(self, action: Any) -> NDArray[np.int64]:
        """The action as indices of devices."""
        found, most = np.asarray(action), self.environment.num_actions - 1
        shape = self._placed.shape if self._is_whole else ()
        if found.shape != shape or found.dtype.kind not in "iub":
            what = f"{shape[0]} indices of devices" if shape else "the index of a device"
            raise InputError(f"An action must be {what}, 0 to {most}, got {action!r}.")
        if found.min(initial=0) < 0 or found.max(initial=0) > most:
            wrong = found[(found < 0) | (found > most)].flat[0]
            raise InputError(f"An action must be an index of `devices`, 0 to {most}, got {wrong}.")
        return found.astype(np.int64)

    def _observation(self) -> dict[str, Any]:
        turn = min(self._turn, len(self._placed) - 1)
        return {
            "features": self._seen(self.table).copy(),
            "placed": self._placed.copy(),
            "turn": np.int64(0 if self._is_whole else turn),
            "mask": self._seen(self.environment.allowed).astype(np.int8),
        }

    def _seen(self, rows: NDArray[Any]) -> NDArray[Any]:
        """All rows with whole placements, else that of the group whose turn it is."""
        return rows if self._is_whole else rows[min(self._turn, len(rows) - 1)]


def group_table(environment: Environment) -> F32:
    """What an agent sees of each group. `[M, A + 4]`

    Time on each device, bytes held, received and sent, each over the largest of the graph; number
    of the most frequent op type over the number of types.
    """
    grouping = environment.grouping
    times = group_costs(grouping)[:, environment.devices]
    (src, dst), num_bytes = group_edges(grouping)
    count = grouping.num_groups
    sizes = [
        group_bytes(grouping).astype(float),
        np.bincount(dst, num_bytes, count),
        np.bincount(src, num_bytes, count),
    ]
    index, names = op_types(grouping.problem)
    pairs = np.bincount(grouping.of_task * len(names) + index, minlength=count * len(names))
    kind = pairs.reshape(count, len(names)).argmax(axis=1) / len(names)
    columns = [
        times / max(1.0, times.max()),
        *(size / max(1.0, size.max()) for size in sizes),
        kind,
    ]
    return np.column_stack(columns).astype(np.float32)
