"""Find the groups of a graph: connected fusible ops of equal depth.

No torch here, so that saved graphs can be fused and planned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from devplace.graph.graph import Op, OpGraph

MAX_MEMBERS = 256
"""Ops of one group at most: a longer chain is cut, so that parts of it can be placed apart."""
MAX_REPEATED_BYTES = 64
"""Results up to this size that need nothing but small sources are made anew in every group."""
Part = Callable[[Op], Hashable]
"""Key of an op: ops with different keys, None apart, are not fused."""


@dataclass(frozen=True)
class Groups:
    """The groups of a graph.

    Attributes:
        members: Ops of each group in topological order, views among them included.
        repeated: Ops that every group which reads them computes for itself; they are members of
            all these groups.
    """

    members: tuple[tuple[int, ...], ...]
    repeated: frozenset[int]


def find_groups(graph: OpGraph, part: Part | None = None) -> Groups:
    """Groups that can be contracted to one op each, without making a cycle.

    Every op gets a depth: the number of ops with a call of their own (products, convolutions,
    whatever is not fusible) on the longest path up to it, itself included. A group is a connected
    component of fusible ops and views of equal depth. Proof that contracting all groups makes no
    cycle: depth never falls along an edge, and rises on an edge into an op with its own call. A
    path that leaves a group and comes back has equal depth all along, so it has no such op, so all
    of it is connected to the group: it never left.

    Any other labels that never fall along an edge and rise into every op with its own call serve as
    well, and the following rules use that. An op that waits for nothing (of the backward pass or
    the update and reads no gradient, as what decays; random numbers) gets the depth of its first
    reader. So does all that is computed again, ops with a call of their own too, so that it is not
    made with the forward pass, and kept. So does a cast of a gradient that is summed over
    micro-batches, and it belongs to the sum: what waits until then is the smaller one. An edge
    between ops of different parts (updates of different modules, micro-batches, ops pinned to
    different devices) raises the depth. A component that holds ops of different keys all the same,
    joined by ops without one, is cut where the key changes; updates of two modules that are joined
    by the gradient of both stay together. A component of more than
    `MAX_MEMBERS` ops is cut in topological order.

    Args:
        graph: The step; its ops say whether they are fusible.
        part: Keeps ops with different keys apart.

    Complexity: O(V + E).
    """
    found = _Finder(graph, part or (lambda op: None))
    return Groups(found.groups(), frozenset(found.repeated))


class _Finder:
    def __init__(self, graph: OpGraph, part: Part) -> None:
        self._graph = graph
        producer = graph.producer
        self._makers = [sorted({producer[t] for t in op.inputs}) for op in graph.ops]
        self._readers: list[list[int]] = [[] for _ in graph.ops]
        for index, makers in enumerate(self._makers):
            for maker in makers:
                self._readers[maker].append(index)
        self._kept = {producer[result.tensor] for result in graph.results}
        self._sums = self._find_sums()
        self._summands = self._find_summands()
        is_cut = any(op.micro_batch > 0 for op in graph.ops)
        joined = self._sums | self._summands
        batch = [-1 if k in joined else op.micro_batch for k, op in enumerate(graph.ops)]
        self._part = [
            (part(op), _updated(op), batch[k] if is_cut and not op.is_source else None)
            for k, op in enumerate(graph.ops)
        ]
        self.repeated = self._find_repeated()
        self._root = self._roots()
        self._depth = self._depths()
        self._delay()

    def _find_sums(self) -> set[int]:
        """Fusible ops that read what another micro-batch than their own has made: they belong to no
        micro-batch."""
        ops, found = self._graph.ops, set()
        for index, op in enumerate(ops):
            batches = {ops[maker].micro_batch for maker in self._makers[index]} - {-1}
            if op.is_fusible and op.micro_batch >= 0 and batches - {op.micro_batch}:
                found.add(index)
        return found

    def _is_of_none(self, index: int) -> bool:
        return self._graph.ops[index].micro_batch < 0 or index in self._sums

    def _find_summands(self) -> set[int]:
        """Casts of gradients that are summed over micro-batches: fusible ops of the backward pass
        of one micro-batch that only ops of none read, and that read no more bytes than they make.
        """
        graph = self._graph
        found: set[int] = set()
        for index in reversed(range(len(graph.ops))):
            op, readers = graph.ops[index], self._readers[index]
            is_able = op.stage == "backward" and (op.is_fusible or op.is_view)
            if self._is_of_none(index) or not is_able or index in self._kept:
                continue
            is_last = all(self._is_of_none(r) or r in found for r in readers)
            if readers and is_last and self._bytes(op.inputs) <= self._bytes(op.outputs):
                found.add(index)
        return found

    def _bytes(self, tensors: Sequence[int]) -> int:
        return sum(self._graph.tensors[t].num_bytes for t in tensors)

    def _find_repeated(self) -> set[int]:
        """Fusible ops with small results that need only each other and small read-only sources."""
        graph = self._graph
        found: set[int] = set()
        free = {
            index
            for index, op in enumerate(graph.ops)
            if op.is_source and index not in graph.replaced and self._is_small(op)
        }
        for index, op in enumerate(graph.ops):
            is_creator = op.is_fusible and not op.inputs
            is_creator |= op.is_view and all(m in found for m in self._makers[index])
            is_small = (op.is_fusible or op.is_view) and self._is_small(op)
            if is_creator or (is_small and all(m in free for m in self._makers[index])):
                free.add(index)
                found.add(index)
        return found

    def _roots(self) -> list[int]:
        """The op that owns the memory of each op's outputs."""
        graph = self._graph
        return [
            graph.producer[graph.storage[op.outputs[0]]] if op.is_view else index
            for index, op in enumerate(graph.ops)
        ]

    def _may_join(self, index: int) -> bool:
        """Whether an op can be a member: views of sources stay outside, so that kernels do not
        depend on which part of them is read."""
        op = self._graph.ops[index]
        is_inside = op.is_view and not self._graph.ops[self._root[index]].is_source
        return (op.is_fusible or is_inside) and index not in self.repeated

    def _is_small(self, op: Op) -> bool:
        return self._bytes(op.outputs) <= MAX_REPEATED_BYTES

    def _rise(self, maker: int, index: int) -> int:
        """By how much depth must rise on an edge."""
        op = self._graph.ops[index]
        if not (op.is_fusible or op.is_view or op.is_source):
            return 1
        pairs = zip(self._part[maker], self._part[index], strict=True)
        return int(any(None not in pair and pair[0] != pair[1] for pair in pairs))

    def _depths(self) -> list[int]:
        depth = [0] * len(self._graph.ops)
        for index, makers in enumerate(self._makers):
            some = (depth[m] + self._rise(m, index) for m in makers if m not in self.repeated)
            depth[index] = max(some, default=0)
        return depth

    def _delay(self) -> None:
        """Bring ops that wait for nothing to their first reader."""
        depth, readers = self._depth, self._readers
        may_wait = self._may_wait()
        for index in reversed(range(len(self._graph.ops))):
            if may_wait[index] and index not in self._kept and readers[index]:
                latest = min(depth[r] - self._rise(index, r) for r in readers[index])
                depth[index] = max(depth[index], latest)

    def _may_wait(self) -> list[bool]:
        """Whether each op is computed again, or is fusible (or a view) and is of the backward pass
        or the update but reads nothing of the backward pass, such as the decay of a moment, or
        reads nothing but what is made anew or comes with the batch as scalars, or is a cast of what
        is summed."""
        graph = self._graph
        in_backward = [False] * len(graph.ops)
        is_free = [False] * len(graph.ops)
        found = [False] * len(graph.ops)
        for index, op in enumerate(graph.ops):
            makers = self._makers[index]
            in_backward[index] = any(in_backward[m] for m in makers) or (
                op.stage == "backward" and not (op.is_fusible or op.is_view or op.is_recomputed)
            )
            is_free[index] = op.role == "scalar" or (
                (op.is_fusible or op.is_view)
                and all(is_free[m] or m in self.repeated for m in makers)
            )
            is_late = op.stage in ("backward", "update") and not in_backward[index]
            is_late |= is_free[index] or index in self._summands
            found[index] = op.is_recomputed or ((op.is_fusible or op.is_view) and is_late)
        return found

    def groups(self) -> tuple[tuple[int, ...], ...]:
        members = [index for index in range(len(self._graph.ops)) if self._may_join(index)]
        label = {index: (self._depth[index], 0, 0) for index in members}
        found = self._components(members, label)
        for component in found:
            changes = self._changes(component)
            for place, index in enumerate(component):
                label[index] = (self._depth[index], changes[index], place // MAX_MEMBERS)
        found = [*self._components(members, label), *self._counters()]
        return tuple(self._with_repeated(one) for one in found if self._is_worth_it(one))

    def _counters(self) -> Iterator[list[int]]:
        """Ops of one key each that only bring small state up to date."""
        ops, producer = self._graph.ops, self._graph.producer
        found: dict[Hashable, list[int]] = {}
        for result in self._graph.results:
            index = producer[result.tensor]
            makers = self._makers[index]
            is_lone = self._may_join(index) and not self._readers[index]
            is_lone &= all(ops[maker].is_source for maker in makers) and not ops[index].pays_alone
            if is_lone and result.replaces in makers and self._is_small(ops[index]):
                found.setdefault(self._part[index], []).append(index)
        for some in found.values():
            yield from (some[k : k + MAX_MEMBERS] for k in range(0, len(some), MAX_MEMBERS))

    def _changes(self, component: Sequence[int]) -> dict[int, int]:
        """How often the key changes on the way to each op of a component, if it holds several."""
        key = {index: self._part[index][0] for index in component}
        changes = dict.fromkeys(component, 0)
        if len({*key.values()} - {None}) > 1:
            for index in component:
                inside = [m for m in self._makers[index] if m in key]
                changes[index] = max(
                    (changes[m] + (key[m] != key[index]) for m in inside), default=0
                )
        return changes

    def _components(
        self, members: Sequence[int], label: dict[int, tuple[int, int, int]]
    ) -> list[list[int]]:
        parent = {index: index for index in members}

        def find(index: int) -> int:
            while parent[index] != index:
                parent[index] = parent[parent[index]]
                index = parent[index]
            return index

        for index in members:
            for maker in self._makers[index]:
                if maker in parent and label[maker] == label[index]:
                    parent[find(index)] = find(maker)
        found: dict[int, list[int]] = {}
        for index in members:
            found.setdefault(find(index), []).append(index)
        return list(found.values())

    def _is_worth_it(self, component: Sequence[int]) -> bool:
        """Whether a group does more than one op; most single ones have good kernels already."""
        ops = [self._graph.ops[index] for index in component]
        real = [op for op in ops if not op.is_view]
        return len(real) > 1 or any(op.pays_alone for op in real)

    def _with_repeated(self, component: Sequence[int]) -> tuple[int, ...]:
        """The members, and what is made anew for them."""
        found, todo = set(component), list(component)
        while todo:
            for maker in self._makers[todo.pop()]:
                if maker in self.repeated and maker not in found:
                    found.add(maker)
                    todo.append(maker)
        return tuple(sorted(found))


def _updated(op: Op) -> str | None:
    """Updates of different modules are different ops, which may be on different devices."""
    return op.module if op.stage == "update" else None
