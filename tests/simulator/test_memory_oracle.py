"""Peak memory worked out again from when things happened, independently of the simulator."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement

from devplace.graph import OpGraph
from devplace.machine import Link
from devplace.problem import Problem
from devplace.simulator import Timeline, simulate

Lives = list[tuple[int, float, float, int]]  # device, from, until, bytes


def without_ties(problem: Problem) -> Problem:
    """Ops and transfers that take at least 1 ns, so that nothing begins and ends at one instant."""
    works = np.array([not (op.is_source or op.is_view) for op in problem.graph.ops])
    links = tuple(replace_link(link) for link in problem.machine.links)
    return Problem(
        problem.graph,
        replace(problem.machine, links=links),
        replace(
            problem.costs, compute_ns=problem.costs.compute_ns + works[:, None].astype(np.int64)
        ),
    )


def replace_link(link: Link) -> Link:
    """The link with 1 ns more latency."""
    return msgspec.structs.replace(link, latency_ns=link.latency_ns + 1)


def root(graph: OpGraph, tensor: int) -> int:
    """The tensor whose storage this one lies in."""
    base = graph.ops[graph.producer[tensor]].alias_of
    return tensor if base < 0 else root(graph, base)


def sent_as(graph: OpGraph, tensor: int) -> int:
    """The tensor that crosses a link for this one: the base if the view is not smaller."""
    base = graph.ops[graph.producer[tensor]].alias_of
    if base < 0:
        return tensor
    whole = sent_as(graph, base)
    return whole if graph.tensors[tensor].num_bytes >= graph.tensors[whole].num_bytes else tensor


def lives(timeline: Timeline) -> Lives:
    """Every piece of memory with its device and the time it is held."""
    graph, found = timeline.problem.graph, []
    start, finish, device = timeline.start_ns, timeline.finish_ns, timeline.devices
    read_only = {
        index for index, op in enumerate(graph.ops) if op.is_source and index not in graph.replaced
    }
    until: dict[int, float] = {}
    for index, op in enumerate(graph.ops):
        if not op.is_view and index not in read_only:
            until |= {tensor: float(finish[index]) for tensor in op.outputs}
            measured = timeline.problem.costs.workspace_bytes
            size = op.workspace_bytes if measured is None else int(measured[index])
            found.append((int(device[index]), start[index], finish[index], size))
    copy_until: dict[tuple[int, int], float] = defaultdict(float)
    copied: set[tuple[int, int]] = set()
    for index, op in enumerate(graph.ops):
        if op.is_view or op.is_source:
            continue
        for tensor in op.inputs:
            base, here = root(graph, tensor), int(device[index])
            home = graph.producer[base]
            if home in read_only:
                copied.add((home, here))
            elif device[home] == here:
                until[base] = max(until[base], finish[index])
            else:
                key = (sent_as(graph, tensor), here)
                copy_until[key] = max(copy_until[key], finish[index])
    for move in timeline.transfers:
        base = root(graph, move.tensor)
        until[base] = max(until[base], move.arrival_ns)
        size = graph.tensors[move.tensor].num_bytes
        if timeline.problem.machine.devices[move.dst].kind == "gpu":  # fixed receive buffers
            found.append((move.dst, 0, math.inf, size))
        else:
            found.append((move.dst, move.request_ns, copy_until[move.tensor, move.dst], size))
    for result in graph.results:
        if root(graph, result.tensor) in until:
            until[root(graph, result.tensor)] = math.inf
    for tensor, end in until.items():
        maker = graph.producer[tensor]
        size = graph.tensors[tensor].num_bytes
        begin = finish[maker] if is_computed_over_old(timeline, tensor) else start[maker]
        found.append((int(device[maker]), begin, end, size))
    held = timeline.problem.costs.held_bytes
    if held is not None:
        own = [i for i, op in enumerate(graph.ops) if not op.is_view and i not in read_only]
        found += [(where, 0, math.inf, int(held[where])) for where in set(device[own].tolist())]
    for source, where in copied:
        size = sum(graph.tensors[t].num_bytes for t in graph.ops[source].outputs)
        found.append((where, 0, math.inf, size))
    return found


def is_computed_over_old(timeline: Timeline, new: int) -> bool:
    """Whether a new value may take the memory of the source it replaces, on a GPU."""
    graph, finish = timeline.problem.graph, timeline.finish_ns
    maker = graph.producer[new]
    here = int(timeline.devices[maker])
    results = [r for r in graph.results if root(graph, r.tensor) == new]
    sources = [r.replaces for r in results if r.tensor == new and r.replaces >= 0]
    is_elementwise = graph.ops[maker].target == "aten.add.Tensor"
    on_gpu = timeline.problem.machine.devices[here].kind == "gpu"
    if not (is_elementwise and on_gpu) or any(r.replaces < 0 for r in results):
        return False
    olds = [graph.ops[source].outputs[0] for source in sources]
    inputs = graph.ops[maker].inputs
    olds = [old for old in olds if {t for t in inputs if root(graph, t) == old} == {old}]
    sizes = graph.tensors
    olds = [old for old in olds if sizes[old].num_bytes == sizes[new].num_bytes]
    if not olds or any(root(graph, r.tensor) == olds[0] for r in graph.results):
        return False
    old = olds[0]
    readers = [
        index
        for index, op in enumerate(graph.ops)
        if not op.is_view and index != maker and any(root(graph, t) == old for t in op.inputs)
    ]
    ends = [finish[index] for index in readers if timeline.devices[index] == here]
    ends += [t.arrival_ns for t in timeline.transfers if root(graph, t.tensor) == old]
    return max(ends, default=0) <= timeline.start_ns[maker]


@settings(max_examples=200, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_peaks_follow_from_when_things_happen(problem: Problem, seed: int) -> None:
    """The peak of every device and pool is the most that lives there at once."""
    problem = without_ties(problem)
    timeline = simulate(problem, random_placement(problem, np.random.default_rng(seed)))
    pieces = lives(timeline)
    instants = sorted({piece[1] for piece in pieces} | {0})
    count = len(problem.machine.devices)
    used = np.zeros((len(instants), count), np.int64)
    for row, now in enumerate(instants):
        for where, begin, end, size in pieces:
            used[row, where] += size if begin <= now < end else 0
    assert timeline.peak_bytes.tolist() == used.max(axis=0).tolist()
    members = problem.core.wires.pool
    for pool in range(len(problem.machine.pools)):
        assert timeline.pool_peak_bytes[pool] == used[:, members == pool].sum(axis=1).max()
