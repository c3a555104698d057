"""Settings of simulated annealing: what may move, how, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MoveSpace:
    """What chains move: read by the native module, which says what each array is for.

    Attributes:
        task_group: Group of each task. `[N]`
        target: The device that a group goes to when another one is wished for. `[G, D]`
        group_class: Class of each group, classes numbered in the order of the model. `[G]`
        class_ptr, class_groups: Groups of each class.
        class_weight: Part of the work in each class. `[C]`
        devices: Where classes may go.
        limit_bytes, pool_limit_bytes: Limits of devices and pools.
        tracks_memory: Whether limits can bind at all.
    """

    task_group: I32
    target: I32
    group_class: I32
    class_ptr: I32
    class_groups: I32
    class_weight: F64
    devices: I32
    limit_bytes: I64
    pool_limit_bytes: I64
    tracks_memory: bool


@dataclass(frozen=True)
class Moves:
    """What chains try, in parts of all moves; what is left over moves one class.

    Attributes:
        swap_share: Two classes change places.
        run_share: Classes that follow one another in the model all go to one device.
        part_share: All that a device has of the model before or behind some class goes to another
            device: a pipeline gets a stage more, less or elsewhere.
        pair_share: Two classes move, each on its own.
        beside_share: Part of the classes moved alone or in pairs that go to the device of a task
            they exchange a tensor with; the others go to any.
        critical_share: Part of the moves that shift runs of the critical path, at most; the first
            levels have less.
        fresh_share: Part of the moves that are judged with critical-path priorities of their own,
            which takes a simulation from the start; the others with those of the placement before.
        order_share: Part of all moves that let a task of the critical path that waited for its
            device run before one that it waited for; none of the first level.
    """

    swap_share: float = 0.2
    run_share: float = 0.1
    part_share: float = 0.05
    pair_share: float = 0.15
    beside_share: float = 0.5
    critical_share: float = 0.9
    fresh_share: float = 0.2
    order_share: float = 0.1


MOVES = Moves()


@dataclass(frozen=True)
class CoolingSchedule:
    """How chains anneal.

    Attributes:
        temperature: First temperature, as a part of the step time; it falls to exp(-6) of that.
        critical_share: Part of the moves that shift runs of the critical path.
        most_evaluations: Per chain.
        patience: Moves without improvement after which a chain ends.
        seconds: For all chains, s; 0: no limit.
        moves: What the moves are.
        least_ns: A step time that no placement that fits can beat: a chain that gets there ends.
    """

    temperature: float
    critical_share: float
    most_evaluations: int
    patience: int
    seconds: float
    moves: Moves = MOVES
    least_ns: int = 0
