"""What stacked gradients give on one, two and four GPUs: the same searches on both kinds of graph.

Writes docs/results/stacked.json; the table is made from it by `tables.py`. The budget counts
simulations, so that the result does not depend on the speed of the computer. Run:
`python experiments/stacked.py [--budget 12000ev] [--seeds 3] [--workers 2]`, some ten minutes.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from common import capture_workload, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.graph import serialize
from devplace.machine import load_machine
from devplace.problem import Problem

WORKLOADS = ("rnnlm", "nmt-2", "nmt-4", "nmt-8", "gnmt-4")
MACHINE = "h200x4"
COUNTS = (1, 2, 4)


def row(saved: bytes, is_stacked: bool, count: int, budget: str, seed: int) -> dict[str, Any]:
    """One search of a saved graph on so many GPUs; with one, everything is on it."""
    graph = serialize.from_json(saved)
    machine = load_machine(MACHINE)
    outside = [name for name in machine.device_names if name not in _names(count)]
    problem = Problem(graph, machine, Analytic()(graph, machine), exclude=outside)
    placer = placers.Single() if count == 1 else placers.Search()
    result = placers.place(problem, placer, budget, seed)
    return {
        "workload": graph.name,
        "stacked": is_stacked,
        "gpus": count,
        "seed": seed,
        "ops": len(graph.ops),
        "step_ns": result.step_ns,
        "peak_bytes": int(result.timeline.peak_bytes.max()),
        "evaluations": result.evaluations,
    }


def _names(count: int) -> set[str]:
    return {f"cuda:{k}" for k in range(count)}


def main() -> None:
    """Run all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="12000ev")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    options = parser.parse_args()
    jobs = []
    for name in options.workloads.split(","):
        for is_stacked in (False, True):
            saved = serialize.to_json(capture_workload(name, stack_gradients=is_stacked))
            for count in COUNTS:
                seeds = range(1 if count == 1 else options.seeds)
                jobs += [(saved, is_stacked, count, options.budget, seed) for seed in seeds]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        rows = list(pool.map(row, *zip(*jobs, strict=True)))
    write(
        "stacked",
        {
            "provenance": provenance(),
            "budget": options.budget,
            "machine": MACHINE,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
