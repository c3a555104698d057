"""All workloads at full size on several machines, one budget, with placers that do not learn.

Writes docs/results/compare_placers.json; tables are made from it by `tables.py`. The budget counts
simulations, so that results do not depend on the speed of the computer. Placers without randomness
run once; one that does not support a problem has a row with the reason. Run:
`python experiments/compare_placers.py [--budget 4000ev] [--seeds 3] [--placers a,b]
[--machines a,b] [--name compare_60s]`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import capture_workload, named_placer, provenance, write

from devplace import placers, workloads
from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.problem import Problem
from devplace.simulator.bounds import lower_bound

MACHINES = ("k40x2", "k40x4", "k40x8", "h100x4")
SEEDED = ("random", "climb", "search", *placers.LEARNING)


def rows(
    name: str, machines: list[str], kinds: list[placers.Placer], budget: str, seeds: int
) -> list[dict[str, Any]]:
    """Results of one workload on all machines."""
    begin = time.process_time()
    graph = capture_workload(name)
    capture_s = time.process_time() - begin
    found = []
    for machine_name in machines:
        machine = load_machine(machine_name)
        problem = Problem(graph, machine, Analytic()(graph, machine))
        bound = lower_bound(problem)
        for placer in kinds:
            base = {"workload": name, "machine": machine_name, "placer": placer.name}
            if reason := placer.supports(problem):
                found.append({**base, "step_ns": None, "feasible": False, "reason": reason})
                continue
            for seed in range(seeds if placer.name in SEEDED else 1):
                result = placers.place(
                    problem, placer, budget, seed, allow_infeasible=True, bound=bound
                )
                found.append(
                    {
                        **base,
                        "seed": seed,
                        "step_ns": result.step_ns,
                        "feasible": result.is_feasible,
                        "lower_bound_ns": bound.step_ns,
                        "transfer_bytes": result.timeline.transfer_bytes,
                        "evaluations": result.evaluations,
                        "seconds": round(result.seconds, 2),
                        "ops": len(graph.ops),
                        "capture_cpu_s": round(capture_s, 1),
                    }
                )
        print(name, machine_name, _shown(found, machine_name), flush=True)
    return found


def _shown(found: list[dict[str, Any]], machine: str) -> dict[str, int | None]:
    return {row["placer"]: row["step_ns"] for row in found if row["machine"] == machine}


def main() -> None:
    """Run everything and write the result after each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="4000ev")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(workloads.NAMES))
    parser.add_argument("--placers", default=",".join(kind().name for kind in placers.PLAIN))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--name", default="compare_placers", help="of the result file")
    options = parser.parse_args()
    kinds = [named_placer(placer) for placer in options.placers.split(",")]
    data: dict[str, Any] = {"provenance": provenance(), "budget": options.budget, "rows": []}
    for name in options.workloads.split(","):
        data["rows"] += rows(
            name, options.machines.split(","), kinds, options.budget, options.seeds
        )
        write(options.name, data)


if __name__ == "__main__":
    main()
