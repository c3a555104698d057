"""Groups whose number follows from graph and machine; groupings with fewer or more than that."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from devplace.placers.colocation_groups import accelerators
from devplace.placers.partitioners.group_graph import mean_work
from devplace.placers.rl.features import group_bytes
from devplace.placers.rl.grouping import (
    Grouping,
    by_module,
    colocated,
    colocation,
    joined,
    renumbered,
)
from devplace.problem import Problem

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

FEW = 64
"""Colocation groups up to which nothing is joined."""
MOST = 192
"""Groups to begin with, at most: the deepest cut by module path that has no more."""


def worth_parting(problem: Problem) -> Grouping:
    """Groups that it may pay to part: by module path, then joined where sending costs more.

    Two groups are joined when their tensors take longer to send than the lighter of the two takes
    to compute, worst first: running them at once cannot make up for it. No join makes a group
    larger than half an accelerator's even share of the work or of what is kept for the whole step,
    so that there is something left to part.
    """
    if problem.core.tasks.num_groups <= FEW:
        return colocation(problem)
    first = by_module(problem, MOST)
    if first.num_groups < 2 * len(problem.usable_devices):  # module paths tell too little
        first = colocated(problem, MOST)
    return _joined_where_dear(first)


def parted(rule: Grouping, count: int) -> Grouping:
    """A grouping with about so many groups, at most; finer or coarser than that of the rule.

    Fewer: what exchanges most is joined further. More: beginning from a deeper cut by module path
    (or by co-location, where paths tell too little), what is dearest to part is joined as by the
    rule, but only down to `count`.

    Args:
        rule: From `worth_parting`.
    """
    if count == rule.num_groups:
        return rule
    problem = rule.problem
    if count < rule.num_groups:
        return joined(problem, rule.of_colocation.astype(np.int64), count)
    if count >= problem.core.tasks.num_groups:
        return colocation(problem)
    first = by_module(problem, 2 * count)
    if first.num_groups < count:
        first = colocated(problem, 2 * count)
    found = _joined_where_dear(first, count)
    if found.num_groups <= count:
        return found
    return joined(problem, found.of_colocation.astype(np.int64), count)


def edge_ns(grouping: Grouping) -> tuple[I64, F64]:
    """Edges between groups `[2, E]` and the time to send each over each kind of link, `[C, E]` ns.

    Edges are those of `features.group_edges`. Every tensor is sent once to each group that reads
    it, with the mean latency of the links.
    """
    tasks, wires = grouping.problem.core.tasks, grouping.problem.core.wires
    count = max(1, grouping.num_groups)
    carrier = np.repeat(np.arange(len(tasks.carrier_bytes)), np.diff(tasks.cons_ptr))
    once = np.unique(carrier * count + grouping.of_task[tasks.cons])
    carrier, reader = once // count, once % count
    maker = grouping.of_task[tasks.carrier_maker[carrier]].astype(np.int64)
    apart = maker != reader
    pairs, index = np.unique(maker[apart] * count + reader[apart], return_inverse=True)
    linked = wires.link_class >= 0
    latency = float(wires.latency_ns[linked].mean()) if linked.any() else 0.0
    each = wires.transfer_ns[:, carrier[apart]] + wires.send_ns[:, carrier[apart]] + latency
    total = np.stack([np.bincount(index, row, len(pairs)) for row in each]).astype(np.float64)
    return np.stack([pairs // count, pairs % count]).astype(np.int64), total


def _joined_where_dear(grouping: Grouping, least: int = 1) -> Grouping:
    """Join what is dear to part, worst first, while there are more than `least` groups."""
    problem = grouping.problem
    fast = accelerators(problem)
    edges, sent = edge_ns(grouping)
    dear = sent.mean(axis=0)
    work = np.bincount(grouping.of_colocation, mean_work(problem, fast), grouping.num_groups)
    kept = group_bytes(grouping).astype(np.float64)
    most = [float(total.sum()) / (2 * len(fast)) for total in (work, kept)]
    unit = np.arange(grouping.num_groups)
    for _ in range(grouping.num_groups - least):
        src, dst = unit[edges[0]], unit[edges[1]]
        low, high = np.minimum(src, dst), np.maximum(src, dst)
        apart = low != high
        pairs, index = np.unique(low[apart] * len(unit) + high[apart], return_inverse=True)
        if not len(pairs):
            break
        one, other = pairs // len(unit), pairs % len(unit)
        cost = np.bincount(index, dear[apart], len(pairs))
        lighter = np.minimum(work[one], work[other])
        small = (work[one] + work[other] <= most[0]) & (kept[one] + kept[other] <= most[1])
        excess = np.where(small | (lighter == 0), cost - lighter, -1.0)
        if excess.max() <= 0:
            break
        keep, gone = int(one[excess.argmax()]), int(other[excess.argmax()])
        work[keep] += work[gone]
        kept[keep] += kept[gone]
        unit[unit == gone] = keep
    return Grouping(problem, renumbered(problem, unit[grouping.of_colocation]))
