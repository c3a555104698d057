"""What each ingredient of the search gives: it is switched off, the budget stays the same.

Writes docs/results/ablation.json; the table is made from it by `tables.py`. The budget counts
simulations, so that the result does not depend on the speed of the computer. Run:
`python experiments/ablation.py [--budget 12000ev] [--seeds 3] [--workers 2]`, some 12 minutes.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from common import capture_workload, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.graph import serialize
from devplace.machine import load_machine
from devplace.placers import Search
from devplace.problem import Problem

WORKLOADS = ("rnnlm", "inception-v3", "gnmt-4", "bert-large", "gpt-2")
MACHINES = ("k40x4", "h100x4")
WHOLE = Search(least_gain=0.0)
MOVES = WHOLE.moves
VARIANTS = {
    "whole search": WHOLE,
    "classes by position, not structure": replace(WHOLE, structural=False),
    "coarsest level alone": replace(WHOLE, levels=1),
    "no temperature": replace(WHOLE, temperature=0.0),
    "one chain": replace(WHOLE, width=1),
    "no moves on the critical path": replace(WHOLE, moves=replace(MOVES, critical_share=0.0)),
    "no swaps": replace(WHOLE, moves=replace(MOVES, swap_share=0.0)),
    "no runs of classes": replace(WHOLE, moves=replace(MOVES, run_share=0.0)),
    "no pairs": replace(WHOLE, moves=replace(MOVES, pair_share=0.0)),
    "any device, not a neighbour's": replace(WHOLE, moves=replace(MOVES, beside_share=0.0)),
    "no fresh priorities": replace(WHOLE, moves=replace(MOVES, fresh_share=0.0)),
    "no improved order": replace(WHOLE, improves_order=False),
    "no refinement of single ops": replace(WHOLE, refines=False),
    "single devices as only starts": replace(WHOLE, heuristics=False),
}


def row(saved: bytes, machine_name: str, variant: str, budget: str, seed: int) -> dict[str, Any]:
    """One search of a saved graph."""
    graph = serialize.from_json(saved)
    machine = load_machine(machine_name)
    problem = Problem(graph, machine, Analytic()(graph, machine))
    result = placers.place(problem, VARIANTS[variant], budget, seed, allow_infeasible=True)
    return {
        "workload": graph.name,
        "machine": machine_name,
        "variant": variant,
        "seed": seed,
        "step_ns": result.step_ns,
        "feasible": result.is_feasible,
        "evaluations": result.evaluations,
        "seconds": round(result.seconds, 2),
    }


def main() -> None:
    """Run everything; the result is written after every workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="12000ev")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--note", default="", help="a sentence for the table")
    options = parser.parse_args()
    data: dict[str, Any] = {"provenance": provenance(), "budget": options.budget}
    data |= {"note": options.note, "rows": []}
    context = get_context("spawn")  # torch has threads, which forks do not survive
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        for name in options.workloads.split(","):
            saved = serialize.to_json(capture_workload(name))
            jobs = [
                pool.submit(row, saved, machine, variant, options.budget, seed)
                for machine in options.machines.split(",")
                for variant in VARIANTS
                for seed in range(options.seeds)
            ]
            data["rows"] += [job.result() for job in jobs]
            write("ablation", data)
            print(name, len(jobs), "searches", flush=True)


if __name__ == "__main__":
    main()
