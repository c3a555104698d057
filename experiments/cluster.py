"""What 1, 2 and 4 workers of a Ray cluster find with the same budget each.

Writes docs/results/cluster.json; the table is made from it by `tables.py`. Work is counted in
simulations, as all workers may share the cores of one computer. Needs the extra `ray`. Run:
`python experiments/cluster.py [--budget 1000ev] [--seeds 3]`, some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import capture_workload, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.problem import Problem

CASES = (("nmt-4", "search"), ("bert-large", "search"), ("nmt-4", "spotlight"))
MACHINE = "h100x4"
COUNTS = (1, 2, 4)


def row(problem: Problem, name: str, count: int, budget: str, seed: int) -> dict[str, Any]:
    """Searches of so many workers, twice."""
    workers = placers.RayWorkers(count)
    first, second = (
        placers.place(problem, placers.by_name(name), budget, seed, workers=workers)
        for _ in range(2)
    )
    return {
        "workload": problem.graph.name,
        "placer": name,
        "workers": count,
        "seed": seed,
        "step_ns": first.step_ns,
        "evaluations": first.evaluations,
        "equal": first.plan.placement == second.plan.placement,
        "note": first.notes[-1],
    }


def main() -> None:
    """Run all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1000ev")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    machine = load_machine(MACHINE)
    rows = []
    for name, placer in CASES:
        graph = capture_workload(name)
        problem = Problem(graph, machine, Analytic()(graph, machine), exclude=["cpu:0"])
        for count in COUNTS:
            for seed in range(options.seeds):
                rows.append(row(problem, placer, count, options.budget, seed))
                print(rows[-1], flush=True)
    write(
        "cluster",
        {
            "provenance": provenance(),
            "budget": options.budget,
            "machine": MACHINE,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
