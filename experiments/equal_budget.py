"""The search beside plain annealing, random and HEFT at an equal budget; and SAGA's schedulers.

Writes docs/results/equal_budget.json; the page is made from it by `tables.py`. The budget counts
simulations, so that results do not depend on the speed of the computer. A run that is in the file
is not done again, so that it can be made in pieces. With `--saga` it is the schedulers of SAGA
instead (`saga_oracle.py`), on graphs without colocation. Run:
`python experiments/equal_budget.py [--budget 4000ev] [--seeds 3] [--workers 2] [--workloads a,b]
[--machines a,b]`, and `python experiments/equal_budget.py --saga`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from common import RESULTS, capture_workload, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.graph import serialize
from devplace.machine import load_machine
from devplace.placers import Budget, Evaluator, Placer
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.bounds import lower_bound

NAME = "equal_budget"
WORKLOADS = ("rnnlm", "nmt-4", "gnmt-4", "bert-large", "inception-v3")
MACHINES = ("k40x4", "k40x8", "h100x4")
SINGLE = placers.Single()


@dataclass(frozen=True)
class Annealing:
    """Plain annealing: one colocation group goes to another device, critical-path priorities.

    The temperature falls geometrically with the budget spent, as a part of the present step time.
    A move that brings the placement nearer to the memory limits is always taken, one that leads
    away from them never.

    Source: Kirkpatrick, Gelatt, Vecchi (1983), Optimization by simulated annealing, Science 220.

    Attributes:
        start: Placer it begins with, of the same budget.
        hot, cold: First and last temperature, parts of the step time.
    """

    name: str = "annealing"
    start: Placer = SINGLE
    hot: float = 1e-3
    cold: float = 1e-6

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Anneal until the budget is spent."""
        tasks = problem.core.tasks
        now = np.zeros(tasks.num_groups, np.int32)
        now[tasks.group] = problem.task_devices(self.start(problem, evaluate, rng))
        movable = np.flatnonzero(problem.allowed.sum(axis=1) > 1)
        key = best_key = (math.inf, math.inf)
        best, tried = now, now.copy()
        while not evaluate.exhausted:
            step, over = evaluate.batch(tried[tasks.group][None, :])
            new_key = int(over[0]), int(step[0])
            if self._takes(key, new_key, evaluate.meter.fraction_spent, rng):
                now, key = tried, new_key
            if new_key < best_key:
                best, best_key = tried, new_key
            group, tried = rng.choice(movable), now.copy()
            others = np.flatnonzero(problem.allowed[group])
            tried[group] = rng.choice(others[others != now[group]])
        return Placement(problem.spaces.op_devices(best[tasks.group]))

    def _takes(
        self,
        key: tuple[float, float],
        new_key: tuple[int, int],
        spent: float,
        rng: np.random.Generator,
    ) -> bool:
        if new_key <= key or new_key[0] != key[0]:
            return new_key <= key
        heat = self.hot * (self.cold / self.hot) ** spent * key[1]
        return rng.random() < math.exp((key[1] - new_key[1]) / heat)


KINDS: dict[str, Placer] = {
    "search": placers.Search(least_gain=0.0),
    "annealing": Annealing(),
    "annealing from heft": Annealing("annealing from heft", placers.Heft()),
    "random": placers.Random(),
    "heft": placers.Heft(),
}
ONCE = ("heft",)
"""Placers without randomness."""


def solve(saved: bytes, wanted: dict[str, Any]) -> dict[str, Any]:
    """One run of one placer, on one thread; the last step is simulated anew."""
    graph = serialize.from_json(saved)
    machine = load_machine(wanted["machine"])
    problem = Problem(graph, machine, Analytic()(graph, machine))
    evaluate = Evaluator(problem, Budget.parse(wanted["budget"]), threads=1)
    rng = np.random.default_rng(wanted["seed"])
    timeline = simulate(problem, KINDS[wanted["placer"]](problem, evaluate, rng))
    return {
        **wanted,
        "step_ns": timeline.makespan_ns,
        "feasible": timeline.is_feasible,
        "evaluations": evaluate.meter.num_evaluations,
        "seconds": round(evaluate.meter.seconds, 2),
        "ops": len(graph.ops),
    }


def bound(saved: bytes, wanted: dict[str, Any]) -> dict[str, Any]:
    """The lower bound of one problem."""
    graph = serialize.from_json(saved)
    machine = load_machine(wanted["machine"])
    begin = time.monotonic()
    found = lower_bound(Problem(graph, machine, Analytic()(graph, machine)))
    seconds = round(time.monotonic() - begin, 2)
    return {**wanted, "lower_bound_ns": found.step_ns, "seconds": seconds}


def jobs(workload: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is to be run of one workload; a job without a placer is the lower bound."""
    for machine in options.machines.split(","):
        problem = {"workload": workload, "machine": machine}
        yield problem
        for placer in KINDS:
            for seed in range(1 if placer in ONCE else options.seeds):
                yield {**problem, "budget": options.budget, "placer": placer, "seed": seed}


def load() -> dict[str, Any]:
    """The result file, or the start of one."""
    path = RESULTS / f"{NAME}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"runs": [], "rows": [], "bounds": [], "saga": {}}


def run_number(data: dict[str, Any], made: dict[str, Any]) -> int:
    """Place of a run's provenance among those of the file; added if it is new."""
    if made not in data["runs"]:
        data["runs"].append(made)
    return int(data["runs"].index(made))


def compare(options: argparse.Namespace) -> None:
    """Run what the file lacks; it is written anew after every run."""
    data = load()
    run = run_number(data, provenance())
    done = [*data["rows"], *data["bounds"]]
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    context = get_context("spawn")  # torch has threads, which forks do not survive
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        waiting = []
        for workload in options.workloads.split(","):
            lacking = [w for w in jobs(workload, options) if not _is_in(w, done)]
            saved = serialize.to_json(capture_workload(workload)) if lacking else b""
            for wanted in lacking:
                waiting.append(pool.submit(solve if "placer" in wanted else bound, saved, wanted))
        print(len(waiting), "jobs", flush=True)
        for job in as_completed(waiting):
            row = {**job.result(), "run": run}
            data["rows" if "placer" in row else "bounds"].append(row)
            write(NAME, data)
            print(*row.values(), flush=True)
    data["rows"].sort(key=_place)
    data["bounds"].sort(key=_place)
    write(NAME, data)


def _is_in(wanted: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    names = ("workload", "machine", "budget", "placer", "seed")
    return any(all(row.get(name) == wanted.get(name) for name in names) for row in rows)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Order of the rows, whichever ended first."""
    known = WORKLOADS.index(row["workload"]) if row["workload"] in WORKLOADS else len(WORKLOADS)
    placer = list(KINDS).index(row["placer"]) if "placer" in row else 0
    budget = row.get("budget", "")
    return known, row["workload"], row["machine"], budget, placer, row.get("seed", 0)


def main() -> None:
    """Either part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="4000ev")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--saga", action="store_true", help="SAGA's schedulers; needs anrg-saga")
    options = parser.parse_args()
    if Budget.parse(options.budget).evaluations is None:
        parser.error(f"--budget must count simulations, such as 4000ev, got {options.budget}")
    if options.saga:
        import saga_oracle

        made = provenance()
        found = saga_oracle.compare(options.budget, options.seeds, options.workers)
        data = load()
        data["saga"] = {**found, "run": run_number(data, made)}
        write(NAME, data)
    else:
        compare(options)


if __name__ == "__main__":
    main()
