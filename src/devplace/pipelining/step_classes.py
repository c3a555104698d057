"""Which ops of a step share a device in a pipeline: backward ops sit with their forward ops."""

from __future__ import annotations

import numpy as np

from devplace.graph.graph import Stage
from devplace.graph.members import Part
from devplace.pipelining.load_problem import I32
from devplace.problem import Problem


def step_classes(problem: Problem) -> I32:
    """Class of each task; tasks of one class share a device. `[N]`

    Colocation groups, and each backward op with the forward op it differentiates: a forward op of
    the same module call and source line (of the same call where no line is known); where there are
    several, the last whose output it reads, else the last that reads what it reads, else that of
    the gradient it continues, else the last one. A fused group stands for all its members: those of
    a backward group are tried in order, the one that makes most first. Nothing is joined that no
    device can run together.

    Source: Tarnawski et al. (2020), arXiv 2006.16423: forward and backward nodes of a layer share a
    device. Differs from it: by op; a captured graph tells module, call and line of a backward op.
    """
    return _Classes(problem).numbered()


class _Classes:
    def __init__(self, problem: Problem) -> None:
        tasks, ops = problem.core.tasks, problem.graph.ops
        self.tasks = tasks
        self.ops = [ops[index] for index in tasks.task_op]
        self._group = tasks.group.tolist()
        self._parent = list(range(tasks.num_groups))
        self._allowed = problem.allowed.copy()
        maker = tasks.carrier_maker
        self._in_ptr: list[int] = tasks.in_ptr.tolist()
        self._carrier: list[int] = tasks.in_carrier.tolist()
        self._maker: list[int] = maker.tolist()
        self._forward: dict[tuple[object, ...], list[int]] = {}
        for task in range(len(self.ops)):
            for key in dict.fromkeys(self._keys(task, "forward")):
                self._forward.setdefault(key, []).append(task)
        self._match: dict[int, int] = {}
        for task, op in enumerate(self.ops):
            if op.stage == "backward":
                found = self._forward_of(task)
                if found is not None:
                    self._match[task] = found
                    self._join(task, found)

    def _keys(self, task: int, stage: Stage) -> list[tuple[object, ...]]:
        """Keys of what an op computes in a stage: with lines, then without."""
        op = self.ops[task]
        parts: list[Part] = [op, *(m for m in op.members if m.is_bound)]
        calls = [
            (p.module, p.call, op.micro_batch, p.source_line) for p in parts if p.stage == stage
        ]
        return [*calls, *(call[:3] for call in calls)]

    def _reads(self, task: int) -> list[int]:
        return self._carrier[self._in_ptr[task] : self._in_ptr[task + 1]]

    def _forward_of(self, task: int) -> int | None:
        keyed = (self._forward.get(key, []) for key in self._keys(task, "backward"))
        others = ([peer for peer in peers if peer != task] for peers in keyed)
        peers = next((peers for peers in others if peers), None)
        if peers is None:
            return None
        if len(peers) == 1:
            return peers[0]
        known, carriers = set(peers), self._reads(task)
        makers = [self._maker[c] for c in carriers]
        made = [m for m in makers if m in known]
        if made:
            return max(made)
        values = {
            c for c, m in zip(carriers, makers, strict=True) if self.ops[m].stage == "forward"
        }
        sharing = [f for f in peers if not values.isdisjoint(self._reads(f))] if values else []
        if sharing:
            return max(sharing)
        continued = [self._match[m] for m in makers if self._match.get(m) in known]
        return max(continued) if continued else peers[-1]

    def _find(self, task: int) -> int:
        x = self._group[task]
        while self._parent[x] != x:
            self._parent[x] = self._parent[self._parent[x]]
            x = self._parent[x]
        return int(x)

    def _join(self, task: int, other: int) -> None:
        low, high = sorted((self._find(task), self._find(other)))
        both = self._allowed[low] & self._allowed[high]
        if low != high and both.any():
            self._parent[high] = low
            self._allowed[low] = both

    def numbered(self) -> I32:
        roots = [self._find(task) for task in range(len(self._group))]
        return np.unique(roots, return_inverse=True)[1].astype(np.int32).reshape(-1)
