"""Size of the CP-SAT model of a step, and its limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem

I32 = NDArray[np.int32]
Bools = NDArray[np.bool_]

# Pairs of transfers of one lane whose order of requests is modelled, each by four constraints, and
# those of all lanes: more are only kept apart.
MAX_PAIRS = 3000
MAX_PAIRS_IN_ALL = 220_000
# A model of so many constraints takes 5 s to build (a core of a server CPU) and 0.4 GB, as much
# again in CP-SAT: none that is larger is built.
MAX_CONSTRAINTS = 1_000_000


class ModelSizeError(Exception):
    """The model has too many constraints or too long times, or takes too long to build."""


def num_constraints(problem: Problem, of_group: I32, allowed: Bools) -> int:
    """About how many constraints the model has, nearly all of transfers: for what one reads, from
    every device that may make it to every other one that may read it, and for pairs on a link.

    Args:
        of_group: Class of each group. `[G]`
        allowed: Devices each class may go to. `[C, D]`
    """
    tasks, wires = problem.core.tasks, problem.core.wires
    of_task = problem.spaces.tasks_from_groups(of_group)
    home, reader = of_task[tasks.carrier_maker], of_task[tasks.cons]
    carrier = np.repeat(np.arange(len(home)), np.diff(tasks.cons_ptr))
    away = reader != home[carrier]
    readers = np.zeros((len(home), allowed.shape[1]), np.int64)
    np.add.at(readers, carrier[away], allowed[reader[away]])
    makers = allowed[home].astype(np.int64)
    others = makers.sum(axis=1, keepdims=True) - makers
    each = int((np.where(readers > 0, readers + 5, 0) * others).sum())
    queued = (wires.transfers.queues != 2).any(axis=0)[:, None]
    on_link = (makers * queued).T @ (readers > 0)
    sizes = on_link[~np.eye(len(on_link), dtype=bool)]
    in_order = sizes[sizes <= most_in_order(sizes.tolist())]
    return each + int(2 * (in_order * (in_order - 1)).sum())


def most_in_order(sizes: list[int]) -> int:
    """Transfers of a queue up to which their order is modelled, such that no queue has more than
    `MAX_PAIRS` of them and all together no more than `MAX_PAIRS_IN_ALL`."""
    most, total = 0, 0
    for size in sorted(set(sizes)):
        pairs = size * (size - 1) // 2
        total += pairs * sizes.count(size)
        if pairs > MAX_PAIRS or total > MAX_PAIRS_IN_ALL:
            break
        most = size
    return most
