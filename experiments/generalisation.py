"""The trained policy of `learned` on model families that it has not seen.

Full-size graphs of the test families (`learned_problems.TEST`; training saw small ones of others)
on a machine of the training, on an unseen card, and with an unseen number of devices. Zero-shot and
fine-tuned with 100 samples, against the same network untrained, Post from scratch, list scheduling
and search. Writes docs/results/generalisation.json after every problem (workload and machine), with
a process for each of `--workers` at a time; a problem that is in the file already, with the same
weights and seeds, is not done again. The table is made from it by `tables.py`. Run:
`python experiments/generalisation.py [--seeds 3] [--workers 2] [--workloads gnmt-4]
[--machines k40x4] [--note TEXT]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import learned_problems
from common import RESULTS, capture_workload, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.graph import serialize
from devplace.machine import load_machine
from devplace.placers import Heft, Learned, Placer, Post, Random, Search, Single
from devplace.placers.rl import saved_weights
from devplace.problem import Placement, Problem
from devplace.simulator.bounds import lower_bound

NAME = "generalisation"
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


def result_of(
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
            result, placement = result_of(problem, machine, method, seed, bound)
            found.append(result)
            if method.label == "learned, zero-shot":
                start = placement
    for seed in range(seeds):
        warm = Method(WARM, Search(start=start), 2400)
        found.append(result_of(problem, machine, warm, seed, bound)[0])
    return found


def save_graph(workload: str, folder: str) -> None:
    """Capture a workload's step into `folder`."""
    Path(folder, f"{workload}.json").write_bytes(serialize.to_json(capture_workload(workload)))


def run(workload: str, machine_name: str, seeds: int, folder: str) -> list[dict[str, Any]]:
    """All methods on one problem; its graph was saved in `folder`."""
    graph = serialize.from_json(Path(folder, f"{workload}.json").read_bytes())
    machine = load_machine(machine_name)
    return rows(Problem(graph, machine, Analytic()(graph, machine)), machine_name, seeds)


def done_before(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that the result file has, if it was made with the same weights and seeds."""
    path = RESULTS / f"{NAME}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    is_same = all(before.get(name) == data[name] for name in ("seeds", "weights_sha256"))
    return before["rows"] if is_same else []


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of workloads and machines, whichever was ready first."""
    machines = list(learned_problems.TEST_MACHINES)

    def place_of(row: dict[str, Any]) -> tuple[int, int]:
        known = row["machine"] in machines
        return (
            WORKLOADS.index(row["workload"]) if row["workload"] in WORKLOADS else len(WORKLOADS),
            machines.index(row["machine"]) if known else len(machines),
        )

    return sorted(found, key=place_of)


def main() -> None:
    """Run what is missing; the result is written after every problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--machines", default=",".join(learned_problems.TEST_MACHINES))
    parser.add_argument("--note", default="", help="a sentence for the table")
    options = parser.parse_args()
    data: dict[str, Any] = {"provenance": provenance(), "seeds": options.seeds}
    data |= {"weights": saved_weights.read(saved_weights.SHIPPED)[1], "note": options.note}
    data["weights_sha256"] = hashlib.sha256(saved_weights.SHIPPED.read_bytes()).hexdigest()
    data["rows"] = done_before(data)
    known = {(row["workload"], row["machine"]) for row in data["rows"]}
    wanted = [(w, m) for w in options.workloads.split(",") for m in options.machines.split(",")]
    todo = [problem for problem in wanted if problem not in known]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool,
    ):
        for saved in [
            pool.submit(save_graph, w, folder) for w in dict.fromkeys(w for w, _ in todo)
        ]:
            saved.result()
        jobs = [pool.submit(run, *problem, options.seeds, folder) for problem in todo]
        for ended in as_completed(jobs):
            found = ended.result()
            data["rows"] = in_order([*data["rows"], *found])
            write(NAME, data)
            print(found[0]["workload"], found[0]["machine"], flush=True)
            for row in found:
                print(
                    f"  {row['method']} {row['budget']}: {row['step_ns'] / 1e6:.2f} ms", flush=True
                )


if __name__ == "__main__":
    main()
