"""What fused graphs change for the planner: searches of equal seconds on plain and fused steps.

Writes docs/results/fused_planning.json; the table is made from it by `tables.py`. Both steps stack
gradients. Run: `python experiments/fused_planning.py [--seconds 10] [--workloads a,b]
[--note TEXT]`, some 20 minutes with all workloads; nothing else should run
meanwhile.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import capture_workload, provenance, write

from devplace import placers, workloads
from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.machine import load_machine
from devplace.problem import Problem
from devplace.report import best_single
from devplace.simulator.bounds import lower_bound

MACHINES = ("k40x4", "h100x4")


def row(graph: OpGraph, machine_name: str, seconds: float) -> dict[str, Any]:
    """One search of a step."""
    machine = load_machine(machine_name)
    problem = Problem(graph, machine, Analytic()(graph, machine))
    bound = lower_bound(problem)
    result = placers.place(
        problem,
        placers.Search(least_gain=0.0),
        f"{seconds}s",
        0,
        allow_infeasible=True,
        bound=bound,
    )
    return {
        "workload": graph.name,
        "machine": machine_name,
        "fused": any(op.members for op in graph.ops),
        "ops": len(graph.ops),
        "tasks": problem.core.tasks.num_tasks,
        "edges": graph.num_edges,
        "single_ns": best_single(problem).makespan_ns,
        "step_ns": result.step_ns,
        "feasible": result.is_feasible,
        "bound_ns": result.bound.step_ns,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
    }


def main() -> None:
    """Run all rows; the result is written after each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workloads", default=",".join(workloads.NAMES))
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    made, rows = provenance(), []
    for name in options.workloads.split(","):
        steps = [capture_workload(name, stack_gradients=True, fuse=fuse) for fuse in (False, True)]
        for machine in MACHINES:
            rows += [row(graph, machine, options.seconds) for graph in steps]
        data = {"provenance": made, "seconds": options.seconds, "note": options.note, "rows": rows}
        write("fused_planning", data)


if __name__ == "__main__":
    main()
