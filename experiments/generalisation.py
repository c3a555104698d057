"""The trained policy of `learned` on model families that it has not seen.

Full-size graphs of the test families (`learned_problems.TEST`; training saw small ones of others)
on a machine of the training, on an unseen card, and with an unseen number of devices. Zero-shot and
fine-tuned with 100 samples, against the same network untrained, Post from scratch, list scheduling
and search. Writes docs/results/generalisation.json; the table is made from it by `tables.py`. Run:
`python experiments/generalisation.py [--seeds 3] [--workloads gnmt-4] [--note TEXT]`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import learned_problems
from common import capture_workload, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.placers import Heft, Learned, Placer, Post, Random, Search, Single
from devplace.placers.rl import weights
from devplace.problem import Placement, Problem
from devplace.simulator.bounds import lower_bound

WORKLOADS = tuple(name for names in learned_problems.TEST.values() for name in names)


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        budget: Evaluations.
        is_seeded: Whether the seed makes a difference.
    """

    label: str
    placer: Placer
    budget: int
    is_seeded: bool = True


METHODS = (
    Method("single", Single(), 100, False),
    Method("heft", Heft(), 100, False),
    Method("learned, zero-shot", Learned(), 1, False),
    Method("untrained, zero-shot", Learned(weights=None), 1, False),
    Method("learned", Learned(), 100),
    Method("untrained", Learned(weights=None), 100),
    Method("random", Random(), 100),
    Method("post", Post(), 100),
    Method("search", Search(), 100),
    Method("post", Post(), 2400),
    Method("search", Search(), 2400),
)
WARM = "search from learned, zero-shot"


def row(
    problem: Problem, machine: str, method: Method, seed: int, bound: Any
) -> tuple[dict[str, Any], Placement]:
    """One result, and its placement."""
    result = placers.place(
        problem, method.placer, f"{method.budget}ev", seed, allow_infeasible=True, bound=bound
    )
    return {
        "workload": problem.graph.name,
        "machine": machine,
        "method": method.label,
        "budget": method.budget,
        "seed": seed,
        "step_ns": result.step_ns,
        "feasible": result.is_feasible,
        "evaluations": result.evaluations,
        "seconds": round(result.seconds, 2),
        "lower_bound_ns": bound.step_ns,
    }, result.placement


def rows(problem: Problem, machine: str, seeds: int) -> list[dict[str, Any]]:
    """All methods on one problem."""
    bound, found = lower_bound(problem), []
    start: Placement | None = None
    for method in METHODS:
        for seed in range(seeds if method.is_seeded else 1):
            result, placement = row(problem, machine, method, seed, bound)
            found.append(result)
            if method.label == "learned, zero-shot":
                start = placement
    for seed in range(seeds):
        warm = Method(WARM, Search(start=start), 2400)
        found.append(row(problem, machine, warm, seed, bound)[0])
    return found


def main() -> None:
    """Run everything; the result is written after every problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--machines", default=",".join(learned_problems.TEST_MACHINES))
    parser.add_argument("--note", default="", help="a sentence for the table")
    options = parser.parse_args()
    data: dict[str, Any] = {"provenance": provenance(), "seeds": options.seeds}
    data |= {"weights": weights.read(weights.SHIPPED)[1], "note": options.note, "rows": []}
    for name in options.workloads.split(","):
        graph = capture_workload(name)
        for machine_name in options.machines.split(","):
            machine = load_machine(machine_name)
            problem = Problem(graph, machine, Analytic()(graph, machine))
            data["rows"] += rows(problem, machine_name, options.seeds)
            write("generalisation", data)
            last = [
                r for r in data["rows"] if (r["workload"], r["machine"]) == (name, machine_name)
            ]
            print(name, machine_name, flush=True)
            for r in last:
                print(f"  {r['method']} {r['budget']}: {r['step_ns'] / 1e6:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
