"""Time per move of a class on NMT-8, from where it matters and as a whole simulation, and how much
of the step such a move changes.

Analytic costs, k40x4, the plan of 5,000 evaluations. Run: `python benchmarks/moves.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import devplace as dp
from devplace import placers, workloads
from devplace.graph.coarsen import coarsen, max_depth
from devplace.placers.colocation_groups import mean_duration_ns
from devplace.placers.local_search.classes import make_classes
from devplace.problem import Problem
from devplace.simulator import make_kernel
from devplace.step_capture import capture

MOVES = 300
REPEATS = 3
WATCHED = 60
"""Moves whose changes are counted, on each level."""


def least(run: Callable[[], object]) -> float:
    """Smallest of the CPU times of some runs, s."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


def changed(kernel: Any, priority: Any, device: Any, moved: Any) -> tuple[float, float, bool]:
    """When the first task ends at another time, as a part of the step; the share of tasks that do;
    and whether none does in the last tenth."""
    before, after = (kernel.trace(row, priority) for row in (device, moved))
    differs = np.flatnonzero(before.finish_ns != after.finish_ns)
    if not len(differs):
        return 1.0, 0.0, True
    ends = np.minimum(before.finish_ns, after.finish_ns)[differs] / before.makespan_ns
    late = np.maximum(before.finish_ns, after.finish_ns)[differs] / before.makespan_ns
    return float(ends.min()), len(differs) / len(device), bool(late.max() < 0.9)


def main() -> None:
    """Print one line per level of classes."""
    workload = workloads.build("nmt-8", device="meta")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    graph = capture(workload.model, workload.inputs, workload.loss_fn, optimizer)
    machine = dp.load_machine("k40x4")
    problem = Problem(graph, machine, dp.Analytic()(graph, machine))
    result = placers.place(problem, placers.Search(), "5000ev", 0, allow_infeasible=True)
    device = problem.task_devices(result.plan.as_placement())
    kernel = make_kernel(problem.core)
    priority = kernel.priority(device)
    base = kernel.trace(device, priority).makespan_ns
    task_group, rng = problem.core.tasks.group, np.random.default_rng(0)
    fast = problem.accelerators
    print(f"{len(device)} tasks, step {base / 1e6:.1f} ms")
    for windows in (0, 1, 2, 4, 8, 16, 32):
        of_op = coarsen(graph, max_depth(graph), windows > 0, max(1, windows)).of_op
        classes = make_classes(problem, of_op, mean_duration_ns(problem))
        of_task = classes.of_group[task_group]
        moves = []
        for _ in range(MOVES):
            tasks = np.flatnonzero(of_task == rng.integers(classes.count)).astype(np.int32)
            others = [d for d in fast if (device[tasks] != d).any()]  # every move changes something
            moves.append((tasks, np.full(len(tasks), rng.choice(others), np.int32)))
        rows = np.stack([device] * MOVES).copy()
        for row, (tasks, targets) in zip(rows, moves, strict=True):
            row[tasks] = targets
        times = [
            least(lambda: kernel.evaluate(rows, priority, track_memory=follows))  # noqa: B023
            for follows in (True, False)
        ]
        for factor in (1e6, 1.002):
            cutoff = np.full(MOVES, min(2**62, int(base * factor)))
            times.append(least(lambda: kernel.moves(device, moves, cutoff)))  # noqa: B023
        memory, full, rest, given_up = (1e3 * t / MOVES for t in times)
        changes = [changed(kernel, priority, device, row) for row in rows[:WATCHED]]
        first, share, settled = np.mean(changes, axis=0)
        print(
            f"{classes.count:4d} classes: whole {full:.3f} ms, from where it matters {rest:.3f} "
            f"({full / rest:.1f}x), given up above 0.2 % {given_up:.3f} ({full / given_up:.1f}x; "
            f"of a whole with memory {memory / given_up:.1f}x)\n              first change at "
            f"{first:.0%} of the step, {share:.0%} of the tasks end at another time, "
            f"{settled:.0%} of the moves change nothing in the last tenth"
        )


if __name__ == "__main__":
    main()
