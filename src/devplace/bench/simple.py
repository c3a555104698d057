"""Baseline solvers: one device, first fit, and the split made by a human."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from devplace.bench.answer import Answer, Blocks, Split, verify
from devplace.errors import InputError
from devplace.instances.records import LoadInstance
from devplace.instances.tarnawski import parse_split
from devplace.instances.text import read_text


def single(instance: LoadInstance) -> Answer:
    """Everything on one accelerator, what it cannot run on a CPU."""
    chosen = 0 if instance.num_accelerators else -1
    return finish(instance, _by_class(instance, [chosen] * len(_classes(instance))))


def greedy(instance: LoadInstance) -> Answer:
    """Accelerators filled up one after the other in topological order, by memory (latency) or by
    an equal share of the work too (throughput); the rest on a CPU.

    Source: Tarnawski et al. (2020), greedy baseline of the latency experiments; differs from it in
    the order of classes that do not depend on each other.
    """
    classes = _classes(instance)
    nodes, k = instance.nodes, instance.num_accelerators
    work = sum((Fraction(node.accelerator_ms) for node in nodes), Fraction(0))
    share = work / k if k and instance.objective == "throughput" else None
    chosen, d, used, load = [], 0, Fraction(0), Fraction(0)
    for row in classes:
        size = sum((Fraction(nodes[v].size_bytes) for v in row), Fraction(0))
        if any(not nodes[v].can_accelerate for v in row):
            chosen.append(-1)
            continue
        full = used + size > instance.memory_bytes or (share is not None and load >= share)
        if d < k and used and full:
            d, used, load = d + 1, Fraction(0), Fraction(0)
        if d >= k or size > instance.memory_bytes:
            chosen.append(-1)
            continue
        used += size
        load += sum((Fraction(nodes[v].accelerator_ms) for v in row), Fraction(0))
        chosen.append(d)
    return finish(instance, _by_class(instance, chosen))


def expert(instance: LoadInstance) -> Answer:
    """The human expert's split from the folder `human-experts` of the authors' files.

    Raises:
        InputError: There is none for this instance.
    """
    path = Path(instance.about.path).resolve()
    for folder in path.parents:
        file = folder / "human-experts" / f"{path.stem}_expert.json"
        if file.is_file():
            device = parse_split(read_text(file), str(file), instance)
            return finish(instance, list(device))
    raise InputError(
        f"There is no expert's split for {instance.about.name}: human-experts/"
        f"{path.stem}_expert.json is in no folder above it. Use another placer."
    )


def finish(instance: LoadInstance, device: Sequence[int | None]) -> Answer:
    """An answer from devices; unknown if some node has none or a rule is broken."""
    if any(d is None for d in device):
        return Answer(None, "unknown", why="a node that no accelerator holds, and no CPU")
    placed = tuple(int(d) for d in device if d is not None)
    solution: Split | Blocks = Split(placed)
    if instance.objective == "latency":
        solution = Blocks(placed, contiguous_blocks(instance, placed))
    verdict = verify(instance, solution)
    if verdict.broken:
        return Answer(None, "unknown", why=verdict.broken[0])
    return Answer(solution, "feasible")


def contiguous_blocks(instance: LoadInstance, device: Sequence[int]) -> tuple[int, ...]:
    """A split cut into contiguous pieces: a node's piece is one more than that of any node of its
    device that reaches it through others.

    Source: Tarnawski et al. (2020), who cut non-contiguous splits so for the latency objective.
    """
    order = _topological(len(instance.nodes), instance.edges)
    inputs: list[list[int]] = [[] for _ in order]
    for a, b in instance.edges:
        inputs[b].append(a)
    block = [0] * len(order)
    for d in sorted({d for d in device if d < instance.num_accelerators}):
        piece = [0] * len(order)
        for v in order:
            if device[v] == d:
                steps = (piece[u] + (device[u] != d) for u in inputs[v])
                piece[v] = max([1, *steps])
                block[v] = d + (piece[v] - 1) * instance.num_accelerators
            else:
                piece[v] = max((piece[u] for u in inputs[v]), default=0)
    return tuple(block)


def _by_class(instance: LoadInstance, chosen: Sequence[int]) -> list[int | None]:
    """Devices of nodes from those of classes; -1 means a CPU."""
    cpu = instance.num_accelerators if instance.num_cpus else None
    device: list[int | None] = [None] * len(instance.nodes)
    for row, d in zip(_classes(instance), chosen, strict=True):
        able = all(instance.nodes[v].can_accelerate for v in row)
        for v in row:
            device[v] = d if d >= 0 and able else cpu
    return device


def _classes(instance: LoadInstance) -> list[list[int]]:
    """Co-location classes, those that depend on each other in a circle joined, in topological
    order."""
    count = len(instance.nodes)
    first: dict[int, int] = {}
    of = [
        v if n.color is None else first.setdefault(n.color, v) for v, n in enumerate(instance.nodes)
    ]
    after: list[set[int]] = [set() for _ in range(count)]
    for a, b in instance.edges:
        if of[a] != of[b]:
            after[of[a]].add(of[b])
    component = _components([sorted(row) for row in after])
    rows: dict[int, list[int]] = {}
    for v in range(count):
        rows.setdefault(component[of[v]], []).append(v)
    return [rows[number] for number in sorted(rows, reverse=True)]


def _components(after: Sequence[Sequence[int]]) -> list[int]:
    """Number of the strongly connected component of each node, larger for earlier ones (Tarjan
    1972, without recursion)."""
    count = len(after)
    index, low, number = [-1] * count, [0] * count, [-1] * count
    stack: list[int] = []
    seen = found = 0
    for root in range(count):
        if index[root] >= 0:
            continue
        path = [(root, 0)]
        while path:
            v, at = path.pop()
            if at == 0:
                index[v] = low[v] = seen
                seen += 1
                stack.append(v)
            elif number[after[v][at - 1]] < 0:
                low[v] = min(low[v], low[after[v][at - 1]])
            if at < len(after[v]):
                path.append((v, at + 1))
                w = after[v][at]
                if index[w] < 0:
                    path.append((w, 0))
                continue
            if low[v] == index[v]:
                while True:
                    w = stack.pop()
                    number[w] = found
                    if w == v:
                        break
                found += 1
    return number


def _topological(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        after[a].append(b)
    number = _components(after)
    return sorted(range(count), key=lambda v: -number[v])
