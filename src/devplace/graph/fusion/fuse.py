"""Contract a captured step: each group of fusible ops becomes one op."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import overload

import msgspec

from devplace.graph.captured import Captured
from devplace.graph.fusion.group import Group, Unit
from devplace.graph.fusion.groups import Groups, Part, find_groups
from devplace.graph.graph import Member, Op, OpGraph, StepResult, Tensor


@overload
def fuse(graph: Captured, part: Part | None = None) -> Captured: ...
@overload
def fuse(graph: OpGraph, part: Part | None = None) -> OpGraph: ...
def fuse(graph: OpGraph, part: Part | None = None) -> OpGraph:
    """The same step with every group of `find_groups` as one op.

    A pure function of the graph; the program of a captured step is fused alike. Names of tensors
    and results stay. What others read of a group is made by it; views of that are views as before.

    Args:
        graph: The step.
        part: Keeps ops with different keys apart, see `find_groups`.

    Returns:
        The fused step; its `plain` is `graph`.
    """
    found = find_groups(graph, part)
    groups = _as_groups(graph, found)
    kept = _kept_ops(graph, groups, found)
    units = _in_order(graph, groups, kept)
    fused, tensor_of = _records(graph, units)
    if not isinstance(graph, Captured):
        return replace(fused, plain=graph)
    from devplace.graph.fusion.fused_program import fused_program

    program = fused_program(graph, units, fused, tensor_of)
    return replace(
        graph,
        ops=fused.ops,
        tensors=fused.tensors,
        results=fused.results,
        meta=fused.meta,
        plain=graph,
        program=program,
    )


def _as_groups(graph: OpGraph, found: Groups) -> list[Group]:
    """Groups with what they read and make; those of which nothing is read are left out."""
    users: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            users.setdefault(tensor, []).append(index)
    results = {result.tensor for result in graph.results}
    groups = []
    for members in found.members:
        inside = set(members) - found.repeated
        made = {t for index in members for t in graph.ops[index].outputs}
        read = [t for index in members for t in graph.ops[index].inputs if t not in made]
        wanted: set[int] = set()
        for index in inside:
            for tensor in graph.ops[index].outputs:
                if tensor in results or any(u not in inside for u in users.get(tensor, ())):
                    wanted |= _owned(graph, tensor, inside)
        outputs = [t for index in members for t in graph.ops[index].outputs if t in wanted]
        if outputs and read:  # what reads nothing has no device of its own
            biggest = _biggest(graph, inside)
            name = f"fused_{graph.ops[biggest].name}"
            inputs = tuple(dict.fromkeys(read))
            repeated = found.repeated & set(members)
            groups.append(Group(name, members, inputs, tuple(outputs), repeated))
    return groups


def _owned(graph: OpGraph, tensor: int, inside: set[int]) -> set[int]:
    """The tensor that owns the memory, if a member of the group makes it."""
    index = graph.producer[tensor]
    while graph.ops[index].is_view and graph.producer[graph.ops[index].alias_of] in inside:
        tensor = graph.ops[index].alias_of
        index = graph.producer[tensor]
    return set() if graph.ops[index].is_view else {tensor}


def _biggest(graph: OpGraph, inside: set[int]) -> int:
    """The member that stands for the group: the one that makes most, updates last."""

    def size(index: int) -> tuple[bool, int, int]:
        op = graph.ops[index]
        made = 0 if op.is_view else sum(graph.tensors[t].num_bytes for t in op.outputs)
        return op.stage != "update", made, -index

    return max(inside, key=size)


def _kept_ops(graph: OpGraph, groups: Sequence[Group], found: Groups) -> list[int]:
    """Ops that stay: those in no group, and members that are views of a tensor others read or are
    read by such ops."""
    computed: set[int] = set()
    for group in groups:
        computed.update(t for t in group.outputs)
    inside = {index for group in groups for index in group.members}
    kept = {index for index in range(len(graph.ops)) if index not in inside}
    todo = [t for index in kept for t in graph.ops[index].inputs]
    todo += [t for group in groups for t in group.inputs]
    todo += [result.tensor for result in graph.results]
    while todo:
        tensor = todo.pop()
        index = graph.producer[tensor]
        if tensor not in computed and index not in kept:
            kept.add(index)
            todo += graph.ops[index].inputs
    read = {t for index in kept for t in graph.ops[index].inputs}
    read |= {t for group in groups for t in group.inputs}
    read |= {result.tensor for result in graph.results}
    return sorted(k for k in kept if k not in found.repeated or read & set(graph.ops[k].outputs))


def _in_order(graph: OpGraph, groups: Sequence[Group], kept: Sequence[int]) -> list[Unit]:
    """All units, each after those it reads; of those ready, the earliest of the trace first.

    A group has the place of the last member that others read, which an update is not.
    """
    units: list[Unit] = [*kept, *groups]
    inputs = [_inputs(graph, unit) for unit in units]
    read = {graph.producer[t] for row in inputs for t in row}
    maker = {t: k for k, unit in enumerate(units) for t in _outputs(graph, unit)}
    place = [unit if isinstance(unit, int) else _last(unit.members, read) for unit in units]
    missing = [len({maker[t] for t in row}) for row in inputs]
    users: list[set[int]] = [set() for _ in units]
    for k, row in enumerate(inputs):
        for tensor in row:
            users[maker[tensor]].add(k)
    ready = [(place[k], k) for k, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, k = heapq.heappop(ready)
        order.append(units[k])
        for user in users[k]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (place[user], user))
    assert len(order) == len(units), "groups at equal depth make no cycle"
    return order


def _last(members: Sequence[int], read: set[int]) -> int:
    return max((index for index in members if index in read), default=members[-1])


def _inputs(graph: OpGraph, unit: Unit) -> tuple[int, ...]:
    return graph.ops[unit].inputs if isinstance(unit, int) else unit.inputs


def _outputs(graph: OpGraph, unit: Unit) -> tuple[int, ...]:
    return graph.ops[unit].outputs if isinstance(unit, int) else unit.outputs


def _records(graph: OpGraph, units: Sequence[Unit]) -> tuple[OpGraph, dict[int, int]]:
    """The fused graph without a program, and the new id of each tensor that is still there."""
    tensor_of: dict[int, int] = {}
    tensors: list[Tensor] = []
    ops: list[Op] = []
    op_of: dict[int, int] = {}
    for unit in units:
        for tensor in _outputs(graph, unit):
            tensor_of[tensor] = len(tensors)
            tensors.append(graph.tensors[tensor])
        if isinstance(unit, int):
            op_of[unit] = len(ops)
            ops.append(_renumbered(graph.ops[unit], tensor_of))
        else:
            ops.append(_fused_op(graph, unit, tensor_of))
    results = tuple(
        StepResult(r.name, tensor_of[r.tensor], r.role, op_of.get(r.replaces, -1))
        for r in graph.results
    )
    meta = {**graph.meta, "fuse": True}
    return OpGraph(graph.name, tuple(ops), tuple(tensors), results, meta), tensor_of


def _renumbered(op: Op, tensor_of: Mapping[int, int]) -> Op:
    return msgspec.structs.replace(
        op,
        inputs=tuple(tensor_of[t] for t in op.inputs),
        outputs=tuple(tensor_of[t] for t in op.outputs),
        alias_of=tensor_of[op.alias_of] if op.is_view else -1,
        is_fusible=False,
        pays_alone=False,
    )


def _fused_op(graph: OpGraph, group: Group, tensor_of: Mapping[int, int]) -> Op:
    members = [graph.ops[index] for index in group.members]
    model = next(op for op in members if f"fused_{op.name}" == group.name)
    batches = {graph.ops[k].micro_batch for k in group.members if k not in group.repeated}
    return Op(
        name=group.name,
        target=f"fused.{_digest(graph, group)}",
        inputs=tuple(tensor_of[t] for t in group.inputs),
        outputs=tuple(tensor_of[t] for t in group.outputs),
        flops=sum(op.flops for op in members),
        bytes_read=sum(_read_bytes(graph, t, members) for t in group.inputs),
        bytes_written=sum(graph.tensors[t].num_bytes for t in group.outputs),
        stage=model.stage,
        module=model.module,
        call=model.call,
        source_line=model.source_line,
        micro_batch=model.micro_batch if len(batches) == 1 else -1,
        workspace_bytes=max(op.workspace_bytes for op in members),
        members=_members(graph, group),
    )


def _members(graph: OpGraph, group: Group) -> tuple[Member, ...]:
    """What the records of a group say of its ops."""
    places: dict[int, tuple[int, ...]] = {tensor: (k,) for k, tensor in enumerate(group.inputs)}
    found = []
    for index in group.members:
        op = graph.ops[index]
        reads = tuple(sorted({k for t in op.inputs for k in places.get(t, ())}))
        if op.is_view:
            places |= dict.fromkeys(op.outputs, reads)
        found.append(
            Member(
                *(op.name, op.target, op.stage, op.module, op.call, op.source_line),
                is_view=op.is_view,
                is_repeated=index in group.repeated,
                moved_bytes=0 if op.is_view else op.bytes_read + op.bytes_written,
                reads=reads,
            )
        )
    return tuple(found)


def _read_bytes(graph: OpGraph, tensor: int, members: Sequence[Op]) -> int:
    """Bytes of an input that are read: all, or the rows that gathers pick."""
    readers = [op for op in members if tensor in op.inputs]
    if any(op.is_view for op in readers):
        return graph.tensors[tensor].num_bytes
    return min(graph.tensors[tensor].num_bytes, max(op.bytes_read for op in readers))


def _digest(graph: OpGraph, group: Group) -> str:
    """Equal for groups that call the same ops on the same shapes, wired alike."""
    name = {t: k for k, t in enumerate(group.inputs)}
    rows: list[object] = [_kind(graph, t) for t in group.inputs]
    for index in group.members:
        op = graph.ops[index]
        name |= {t: len(name) + k for k, t in enumerate(op.outputs)}
        made = [_kind(graph, t) for t in op.outputs]
        rows.append((op.target, [name[t] for t in op.inputs], made))
    rows.append([name[t] for t in group.outputs])
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


def _kind(graph: OpGraph, tensor: int) -> tuple[tuple[int, ...], str]:
    return graph.tensors[tensor].shape, graph.tensors[tensor].dtype
