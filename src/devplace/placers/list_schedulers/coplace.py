"""Co-placement: ops that list schedulers should keep together."""

from __future__ import annotations

import numpy as np

from devplace.placers.colocation_groups import I32, mean_duration_ns
from devplace.problem import Problem


def coplaced(problem: Problem) -> I32:
    """Unit of each task: colocation groups, joined further. `[N]`

    A forward op whose outputs have one forward op as their only forward reader joins that reader.
    Any other op joins the forward ops of its module call (where these are in several units, the
    costliest); so backward ops sit with the forward ops they differentiate. Nothing is joined that
    no device can run together.

    Source: Jeon et al. (2020), Baechi, SoCC, co-placement and placement of forward operators only.
    Differs from it in that the forward op of a backward op is known only by module and call.
    """
    units = _Units(problem)
    tasks, ops = problem.core.tasks, problem.graph.ops
    of_task = [ops[index] for index in tasks.task_op]
    forward = np.array([op.stage == "forward" for op in of_task], bool)
    out, cons_ptr, cons = tasks.out_ptr.tolist(), tasks.cons_ptr.tolist(), tasks.cons.tolist()
    for task in np.flatnonzero(forward)[::-1].tolist():
        readers = set(cons[cons_ptr[out[task]] : cons_ptr[out[task + 1]]])
        ahead = [reader for reader in readers if forward[reader]]
        if len(ahead) == 1:
            units.join(task, ahead[0])
    time = mean_duration_ns(problem).tolist()
    heads: dict[tuple[str, int, int], int] = {}
    for task in np.flatnonzero(forward).tolist():
        key = (of_task[task].module, of_task[task].call, of_task[task].micro_batch)
        if key not in heads or time[task] > time[heads[key]]:
            heads[key] = task
    for task, op in enumerate(of_task):
        head = heads.get((op.module, op.call, op.micro_batch))
        if op.stage == "backward" and op.module and head is not None:
            units.join(task, head)
    return units.numbered()


class _Units:
    """Union-find over colocation groups that keeps the devices all members may go to."""

    def __init__(self, problem: Problem) -> None:
        self._group = problem.core.tasks.group.tolist()
        self._parent = list(range(problem.core.tasks.num_groups))
        self._allowed = problem.allowed.copy()

    def find(self, task: int) -> int:
        x = self._group[task]
        while self._parent[x] != x:
            self._parent[x] = self._parent[self._parent[x]]
            x = self._parent[x]
        return int(x)

    def join(self, task: int, other: int) -> None:
        low, high = sorted((self.find(task), self.find(other)))
        both = self._allowed[low] & self._allowed[high]
        if low != high and both.any():
            self._parent[high] = low
            self._allowed[low] = both

    def numbered(self) -> I32:
        roots = [self.find(task) for task in range(len(self._group))]
        return np.unique(roots, return_inverse=True)[1].astype(np.int32).reshape(-1)
