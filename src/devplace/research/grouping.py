"""What a policy decides together: colocation groups joined by the heuristics of the papers.

In shapes, `G` is colocation groups, `M` groups of a policy, `D` devices, `N` tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from devplace.placers.colocation_groups import group_time_ns
from devplace.placers.partitioners.group_graph import GroupGraph, group_graph, mean_work
from devplace.problem import Problem

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Grouping:
    """Groups that a policy places, numbered in topological order of their first task.

    Attributes:
        problem: What is placed.
        of_colocation: Group of each colocation group. int32 `[G]`
    """

    problem: Problem
    of_colocation: I32

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return int(self.of_colocation.max()) + 1 if len(self.of_colocation) else 0

    @cached_property
    def of_task(self) -> I32:
        """Group of each task. `[N]`"""
        return self.problem.spaces.tasks_from_groups(self.of_colocation)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Devices that all members may go to; where there is none, those that any may. `[M, D]`"""
        count = self.num_groups
        members = np.bincount(self.of_colocation, minlength=count)
        votes = np.zeros((count, self.problem.allowed.shape[1]), np.int64)
        np.add.at(votes, self.of_colocation, self.problem.allowed.astype(np.int64))
        everyone = votes == members[:, None]
        found: NDArray[np.bool_] = np.where(everyone.any(axis=1)[:, None], everyone, votes > 0)
        return found

    def colocation_devices(self, devices: I32) -> I32:
        """Device of each colocation group from that of each group.

        A member that may not go there (pins, missing kernels) goes to its fastest allowed device.

        Args:
            devices: int32 `[B, M]`.

        Returns:
            int32 `[B, G]`.
        """
        wish: I32 = devices[:, self.of_colocation]
        ok: NDArray[np.bool_] = self.problem.allowed[np.arange(wish.shape[1])[None, :], wish]
        return wish if ok.all() else np.where(ok, wish, self._fallback)

    @cached_property
    def _fallback(self) -> I32:
        time = np.where(self.problem.allowed, group_time_ns(self.problem), np.inf)
        fastest: I32 = time.argmin(axis=1).astype(np.int32)
        return fastest


def colocation(problem: Problem) -> Grouping:
    """Every colocation group by itself: nothing is joined."""
    return Grouping(problem, renumbered(problem, np.arange(problem.core.tasks.num_groups)))


def at_most(problem: Problem, most: int) -> Grouping:
    """`colocated` with at most so many groups; 0: every colocation group by itself."""
    return colocated(problem, most) if most else colocation(problem)


def colocated(problem: Problem, most: int = 64) -> Grouping:
    """Groups by the co-location heuristics of ColocRL, as far as needed for at most `most`.

    In turn, until there are no more than `most`: every colocation group by itself; an op whose only
    reader is one op sits with it, and a backward op with the first forward op of its module call;
    whole module calls, such as one time step of an LSTM cell, of the attention or of the softmax;
    what is left joins the neighbour it exchanges most with (`joined`).

    Source: Mirhoseini et al. (2017), Device placement optimization with reinforcement learning,
    arXiv 1706.04972, section on co-location groups. Differs from it in that LSTM steps, attention
    and softmax are told by module path and call instead of by hand for each model, in the cap, and
    in that a small graph is left as it is.
    """
    unit = np.arange(problem.core.tasks.num_groups)
    if len(unit) > most:
        unit = _single_readers(problem)
    if int(unit.max(initial=0)) + 1 > most:
        unit = _module_calls(problem, unit)
    return joined(problem, unit, most)


def _single_readers(problem: Problem) -> I64:
    """Join what ColocRL joins: an op with its only reader, backward ops with their forward ops."""
    tasks = problem.core.tasks
    ops = [problem.graph.ops[op] for op in tasks.task_op]
    edges = task_edges(problem)
    only = np.full(tasks.num_tasks, -1)
    only[edges[0]] = edges[1]
    only[np.bincount(edges[0], minlength=tasks.num_tasks) != 1] = -1
    calls = [(op.module, op.call, op.micro_batch) for op in ops]
    head: dict[tuple[str, int, int], int] = {}
    for task, op in enumerate(ops):
        if op.stage == "forward" and op.module:
            head.setdefault(calls[task], task)
    units = _Units(tasks.num_groups)
    for task, op in enumerate(ops):
        other = int(only[task])
        if op.stage == "backward":
            other = head.get(calls[task], other)
        if other >= 0:
            units.join(int(tasks.group[task]), int(tasks.group[other]))
    return units.numbered()


class _Units:
    """Union-find over colocation groups."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, unit: int) -> int:
        while self._parent[unit] != unit:
            self._parent[unit] = self._parent[self._parent[unit]]
            unit = self._parent[unit]
        return unit

    def join(self, unit: int, other: int) -> None:
        low, high = sorted((self.find(unit), self.find(other)))
        self._parent[high] = low

    def numbered(self) -> I64:
        roots = [self.find(unit) for unit in range(len(self._parent))]
        found: I64 = np.unique(roots, return_inverse=True)[1].reshape(-1).astype(np.int64)
        return found


def _module_calls(problem: Problem, unit: I64) -> I64:
    """Join units whose longest tasks belong to the same call of the same module."""
    tasks = problem.core.tasks
    by_time = np.argsort(problem.core.wires.duration_ns.mean(axis=1), kind="stable")
    longest = np.zeros(int(unit.max(initial=0)) + 1, np.int64)
    longest[unit[tasks.group[by_time]]] = by_time
    known: dict[tuple[object, ...], int] = {}
    found = []
    for number, task in enumerate(longest.tolist()):
        op = problem.graph.ops[tasks.task_op[task]]
        key = (op.module, op.call, op.micro_batch) if op.module else (number,)
        found.append(known.setdefault(key, len(known)))
    return np.array(found)[unit]


def task_edges(problem: Problem) -> I64:
    """Edges from the maker of a tensor to each of its readers, each once. `[2, E]`"""
    tasks = problem.core.tasks
    maker = np.repeat(tasks.carrier_maker, np.diff(tasks.cons_ptr))
    pairs = np.unique(maker * tasks.num_tasks + tasks.cons)
    return np.stack([pairs // tasks.num_tasks, pairs % tasks.num_tasks]).astype(np.int64)


def joined(problem: Problem, unit: I64, most: int) -> Grouping:
    """Join units until there are at most `most`, by heavy-edge matching.

    In rounds, each unit, lightest first, joins the neighbour with which it exchanges the most bytes
    for its work, unless the two together would be heavier than an even share; the limit grows when
    a round joins nothing. Units without neighbours join each other.

    Args:
        unit: Unit of each colocation group. `[G]`

    Complexity: O(E log G).
    """
    if most < 1:
        raise ValueError("at least one group")
    unit = np.unique(unit, return_inverse=True)[1].reshape(-1).astype(np.int64)
    graph, work = group_graph(problem), mean_work(problem, problem.accelerators)
    limit = 1.5 * float(work.sum()) / most + 1
    while (count := int(unit.max(initial=0)) + 1) > most:
        load = np.bincount(unit, work, count).astype(np.float64)
        partner = _matching(graph, unit, load, limit, count - most)
        merged = np.unique(partner, return_inverse=True)[1].reshape(-1)
        if int(merged.max(initial=0)) + 1 == count:
            limit *= 2
        unit = merged[unit]
    return Grouping(problem, renumbered(problem, unit))


def _matching(graph: GroupGraph, unit: I64, work: F64, limit: float, surplus: int) -> I64:
    """Which unit each unit joins (itself if none); at most `surplus` join."""
    count = len(work)
    ends = np.repeat(unit, np.diff(graph.ptr))
    others = unit[graph.neighbour]
    apart = ends != others
    pairs, index = np.unique(ends[apart] * count + others[apart], return_inverse=True)
    num_bytes = np.bincount(index, graph.num_bytes[apart], len(pairs))
    ptr = np.searchsorted(pairs, np.arange(count + 1) * count)
    partner, taken = np.arange(count), np.zeros(count, bool)
    lonely = -1
    for one in np.argsort(work, kind="stable").tolist():
        if surplus == 0:
            break
        if taken[one]:
            continue
        row = slice(int(ptr[one]), int(ptr[one + 1]))
        others_of = pairs[row] % count
        free = ~taken[others_of] & (work[one] + work[others_of] <= limit)
        if free.any():
            gain = num_bytes[row] / (work[others_of] + work[one] + 1)
            other = int(others_of[np.where(free, gain, -1).argmax()])
        elif not len(others_of) and lonely >= 0 and work[one] + work[lonely] <= limit:
            other, lonely = lonely, -1
        else:
            lonely = one if not len(others_of) else lonely
            continue
        partner[one] = partner[other] = min(one, other)
        taken[[one, other]] = True
        surplus -= 1
    return partner


def renumbered(problem: Problem, unit: NDArray[np.integer]) -> I32:
    """The same groups numbered by their first task."""
    spaces = problem.spaces
    per_task = spaces.tasks_from_groups(unit)
    _, first, index = np.unique(per_task, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return spaces.groups_from_tasks(rank[index.reshape(-1)])
