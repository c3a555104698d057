"""What a policy sees of ops, groups and devices: small pure functions on arrays.

In shapes, `N` is tasks (ops that are placed), `M` groups, `T` op types, `D` devices.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem
from devplace.research.grouping import Grouping, task_edges

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

MAX_OUTPUTS = 5
"""Outputs of an op that count, and dimensions of each: HDP's released code has 5 x 5."""


def op_types(problem: Problem) -> tuple[I64, tuple[str, ...]]:
    """Type of each task as an index into the names of types, which are sorted. `[N]`"""
    targets = [problem.graph.ops[op].target for op in problem.core.tasks.task_op]
    names, index = np.unique(targets, return_inverse=True)
    return index.reshape(-1).astype(np.int64), tuple(str(name) for name in names)


def one_hot(index: I64, count: int) -> F32:
    """Rows with a single 1. `[N, count]`"""
    rows = np.zeros((len(index), count), np.float32)
    rows[np.arange(len(index)), index] = 1
    return rows


def output_shapes(problem: Problem, outputs: int = MAX_OUTPUTS, dims: int = MAX_OUTPUTS) -> F32:
    """Sizes of the first outputs of each task; -1 where there is none. `[N, outputs * dims]`"""
    graph, tasks = problem.graph, problem.core.tasks
    found = np.full((tasks.num_tasks, outputs, dims), -1, np.float32)
    for task, op in enumerate(tasks.task_op):
        for k, tensor in enumerate(graph.ops[op].outputs[:outputs]):
            shape = graph.tensors[tensor].shape[:dims]
            found[task, k, : len(shape)] = shape
    return found.reshape(tasks.num_tasks, outputs * dims)


def num_outputs(problem: Problem) -> I64:
    """Number of outputs of each task's op. `[N]`"""
    ops = problem.graph.ops
    return np.array([len(ops[op].outputs) for op in problem.core.tasks.task_op], np.int64)


def neighbour_table(problem: Problem, most: int = 10) -> F32:
    """Up to `most` neighbours of each task, readers first: (index, +1 reader or -1 maker) pairs.

    Padded with (-1, 0). HDP's adjacency feature. `[N, 2 * most]`
    """
    edges, count = task_edges(problem), problem.core.tasks.num_tasks
    ends = np.concatenate([edges[0], edges[1]])
    others = np.concatenate([edges[1], edges[0]])
    sign = np.concatenate([np.ones(edges.shape[1]), -np.ones(edges.shape[1])])
    order = np.argsort(ends, kind="stable")
    ends, others, sign = ends[order], others[order], sign[order]
    place = np.arange(len(ends)) - np.searchsorted(ends, ends)
    kept = place < most
    table = np.zeros((count, most, 2), np.float32)
    table[:, :, 0] = -1
    table[ends[kept], place[kept], 0] = others[kept]
    table[ends[kept], place[kept], 1] = sign[kept]
    return table.reshape(count, 2 * most)


def group_edges(grouping: Grouping) -> tuple[I64, I64]:
    """Edges between different groups `[2, E]`, and the bytes that cross each `[E]`.

    A tensor counts once for each group that reads it.
    """
    tasks, count = grouping.problem.core.tasks, max(1, grouping.num_groups)
    carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
    once = np.unique(carrier * count + grouping.of_task[tasks.cons])
    carrier, reader = once // count, once % count
    maker = grouping.of_task[tasks.carrier_maker[carrier]].astype(np.int64)
    apart = maker != reader
    pairs, index = np.unique(maker[apart] * count + reader[apart], return_inverse=True)
    num_bytes = np.zeros(len(pairs), np.int64)
    np.add.at(num_bytes, index, tasks.carrier_bytes[carrier[apart]])
    return np.stack([pairs // count, pairs % count]).astype(np.int64), num_bytes


def group_adjacency(grouping: Grouping) -> F32:
    """1 at (i, j) if group i makes what group j reads. `[M, M]`"""
    adjacency = np.zeros((grouping.num_groups, grouping.num_groups), np.float32)
    (src, dst), _ = group_edges(grouping)
    adjacency[src, dst] = 1
    return adjacency


def group_sums(grouping: Grouping, values: NDArray[np.floating]) -> F32:
    """Rows of tasks summed over each group. `[N, F]` -> `[M, F]`"""
    total = np.zeros((grouping.num_groups, values.shape[1]))
    np.add.at(total, grouping.of_task, values)
    return total.astype(np.float32)


def group_features(grouping: Grouping) -> F32:
    """Type counts, summed output shapes, and edges out of and into each group. `[M, T + 25 + 2 M]`

    Padding of shapes counts as nothing. Each block of a row is divided by its largest value + 1,
    as shapes would drown counts.

    Source: Mirhoseini et al. (2018), A hierarchical model for device placement, ICLR, section on
    group embeddings. Differs from the released code, which divides whole rows, and adds shapes to
    the columns of type counts.
    """
    problem = grouping.problem
    index, names = op_types(problem)
    counts = group_sums(grouping, one_hot(index, len(names)))
    shapes = group_sums(grouping, np.maximum(output_shapes(problem), 0))
    adjacency = group_adjacency(grouping)
    blocks = [counts, shapes, adjacency, adjacency.T]
    return np.concatenate([_scaled_rows(block) for block in blocks], axis=1)


def group_costs(grouping: Grouping) -> F64:
    """Time of each group on each device, ns. `[M, D]`"""
    columns = grouping.problem.core.wires.duration_ns.T
    return np.stack([np.bincount(grouping.of_task, ns, grouping.num_groups) for ns in columns], 1)


def group_bytes(grouping: Grouping) -> I64:
    """Bytes that each group keeps for the whole step (parameters, state, results). `[M]`"""
    tasks = grouping.problem.core.tasks
    held = np.zeros(tasks.num_tasks, np.int64)
    np.add.at(held, tasks.storage_maker, tasks.storage_bytes * (tasks.storage_held > 0))
    for const, (begin, end) in enumerate(pairwise(tasks.const_ptr.tolist())):
        if end > begin:
            held[tasks.const_user[begin]] += tasks.const_bytes[const]
    total = np.zeros(grouping.num_groups, np.int64)
    np.add.at(total, grouping.of_task, held)
    return total


def device_features(problem: Problem) -> F32:
    """Per usable device: relative time of the whole step there, log10 of its memory limit in bytes,
    whether it is a CPU, log10 of mean bandwidth to the other usable devices. `[A, 4]`
    """
    usable = list(problem.usable_devices)
    total = problem.core.wires.duration_ns[:, usable].sum(axis=0).astype(float)
    names = [problem.machine.device_names[d] for d in usable]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for link in problem.machine.links:
        if link.src in rates and link.dst in rates:
            rates[link.src].append(float(link.bytes_per_s))
    rows = []
    for k, device in enumerate(usable):
        rate = rates[names[k]]
        rows.append(
            (
                total[k] / total.max() if total.max() else 1.0,
                np.log10(max(1, problem.limit_bytes[device])),
                float(problem.machine.devices[device].traits.is_host),
                np.log10(max(1.0, float(np.mean(rate)))) if rate else 0.0,
            )
        )
    return np.array(rows, np.float32)


def topological_positions(grouping: Grouping) -> F64:
    """Mean position of each group's tasks in the graph, 0 to 1. `[M]`"""
    count = np.bincount(grouping.of_task, minlength=grouping.num_groups)
    place = np.arange(len(grouping.of_task)) / max(1, len(grouping.of_task) - 1)
    mean: F64 = np.bincount(grouping.of_task, place, grouping.num_groups) / count
    return mean


def _scaled_rows(block: F32) -> F32:
    scaled: F32 = block / (block.max(axis=1, keepdims=True, initial=0) + 1)
    return scaled
