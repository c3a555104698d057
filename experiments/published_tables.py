"""The result tables of HDP and of Mars, rebuilt: every system on the same budget of evaluations.

Workloads and numbers of devices are those of the papers (Mirhoseini et al. 2018, table 1; Lan et
al. 2021, as in its authors' slides), on the `k40` machines with analytic costs; the rows of Mars
have a memory limit that one GPU does not keep. Writes docs/results/published_tables.json after each
run; a run that is in the file already is not done again. Tables and pictures are made from it by
`tables.py`. Run:
`python experiments/published_tables.py [--budget 2400ev] [--seeds 0,1,2,3,4] [--workers 2]
[--rows nmt-4,gnmt-4] [--placers post,mars]`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import RESULTS, capture_workload, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.graph import serialize
from devplace.machine import load_machine
from devplace.problem import Problem
from devplace.simulator.bounds import lower_bound

NAME = "published_tables"


@dataclass(frozen=True)
class Row:
    """One row of a published table.

    Attributes:
        limit: Most memory of a step on each GPU; None: what the card has.
    """

    table: str
    workload: str
    machine: str
    limit: str | None = None


HDP, MARS = "hdp", "mars"
ROWS = (
    Row(HDP, "inception-v3", "k40x2"),
    Row(HDP, "resnet-152", "k40x2"),
    Row(HDP, "rnnlm", "k40x2"),
    Row(HDP, "nmt-2", "k40x2"),
    Row(HDP, "nmt-4", "k40x4"),
    Row(HDP, "nmt-8", "k40x8"),
    Row(MARS, "inception-v3", "k40x4"),
    Row(MARS, "gnmt-4", "k40x4", "3GiB"),
    Row(MARS, "bert-large", "k40x4", "2GiB"),
)
GPU_ONLY = "gpu-only"
FIXED = ("cpu", GPU_ONLY, "expert", "scotch", "mincut", "heft")
SYSTEMS = ("colocrl", "hdp", "spotlight", "post", "mars")
VARIANTS = ("mars-no-pretraining", "grouper-placer", "encoder-placer")
PARTS = ("post-ce", "post-ppo", "post-pg", "hdp-no-grouping", "hdp-random-grouping", "placeto")
PARTS_ROWS = ("nmt-4", "gnmt-4")


@dataclass(frozen=True)
class Job:
    """One run of one placer."""

    row: Row
    placer: str
    seed: int
    budget: str

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What makes it the same run."""
        return (self.row.workload, self.row.machine, self.placer, self.seed, self.budget)


def jobs(rows: list[Row], names: list[str] | None, seeds: list[int], budget: str) -> Iterator[Job]:
    """All runs: those without randomness once, parts of systems on some rows."""
    for row in rows:
        wanted = [*FIXED, "search", "random", *SYSTEMS, *VARIANTS]
        wanted += PARTS if row.workload in PARTS_ROWS else ()
        for name in wanted:
            if names is None or name in names:
                for seed in seeds[:1] if name in FIXED else seeds:
                    yield Job(row, name, seed, budget)


def save_graph(workload: str, folder: str) -> None:
    """Capture a workload's step into `folder`."""
    Path(folder, f"{workload}.json").write_bytes(serialize.to_json(capture_workload(workload)))


@cache
def problem_of(row: Row, folder: str) -> Problem:
    """Problem of a row; its graph was saved in `folder`."""
    graph = serialize.from_json(Path(folder, f"{row.workload}.json").read_bytes())
    machine = load_machine(row.machine)
    gpus = [device.name for device in machine.devices if device.kind != "cpu"]
    limits = {name: row.limit for name in gpus} if row.limit else {}
    return Problem(graph, machine, Analytic()(graph, machine), limits)


@cache
def bound_of(row: Row, folder: str) -> Any:
    """Lower bounds of a row."""
    return lower_bound(problem_of(row, folder))


def cost(job: Job) -> int:
    """Rank of how long a run takes; the longest go first."""
    slow = ("hdp", "mars", "grouper", "encoder", "colocrl", "spotlight", "placeto")
    large = ("nmt-8", "gnmt-4", "nmt-4", "nmt-2")
    system = job.placer.startswith(slow) * (2 if job.placer.startswith("hdp") else 1)
    return 10 * system + (5 - large.index(job.row.workload) if job.row.workload in large else 0)


def run(job: Job, folder: str) -> dict[str, Any]:
    """Do one run."""
    problem = problem_of(job.row, folder)
    if job.placer == GPU_ONLY:
        gpus = [d.name for d in problem.machine.devices if d.kind != "cpu"]
        others = [name for name in problem.machine.device_names if name != gpus[0]]
        problem = replace(problem, exclude=others)
        placer: placers.Placer = placers.Single()
    else:
        placer = placers.by_name(job.placer)
    bound, begin = bound_of(job.row, folder), time.process_time()
    result = placers.place(
        problem,
        placer,
        job.budget,
        job.seed,
        allow_infeasible=True,
        bound=bound,
    )
    cpu_s = time.process_time() - begin
    return {
        "workload": job.row.workload,
        "machine": job.row.machine,
        "placer": job.placer,
        "seed": job.seed,
        "budget": job.budget,
        "step_ns": result.step_ns,
        "feasible": result.is_feasible,
        "lower_bound_ns": result.bound.step_ns,
        "evaluations": result.evaluations,
        "cpu_s": round(cpu_s, 2),
        "ops": len(problem.graph.ops),
        "history": [[evaluations, step] for evaluations, _, step in result.history],
    }


def done_before() -> list[dict[str, Any]]:
    """Rows that the result file has."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def main() -> None:
    """Do what is missing, several runs at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="2400ev")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rows", help="workloads, all by default")
    parser.add_argument("--placers", help="all by default")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    chosen = options.rows.split(",") if options.rows else [row.workload for row in ROWS]
    rows = [row for row in ROWS if row.workload in chosen]
    names = options.placers.split(",") if options.placers else None
    seeds = [int(seed) for seed in options.seeds.split(",")]
    data: dict[str, Any] = {
        "provenance": provenance(),
        "budget": int(options.budget.removesuffix("ev")),
        "problems": [asdict(row) for row in ROWS],
        "rows": done_before(),
    }
    known = {
        tuple(row[name] for name in ("workload", "machine", "placer", "seed", "budget"))
        for row in data["rows"]
    }
    wanted = jobs(rows, names, seeds, options.budget)
    todo = sorted((job for job in wanted if job.key not in known), key=lambda job: -cost(job))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool,
    ):
        workloads = dict.fromkeys(job.row.workload for job in todo)
        for captured in [pool.submit(save_graph, name, folder) for name in workloads]:
            captured.result()
        for ended in as_completed([pool.submit(run, job, folder) for job in todo]):
            data["rows"].append(row := ended.result())
            write(NAME, data)
            shown = {k: row[k] for k in ("workload", "machine", "placer", "seed", "cpu_s")}
            print(f"{row['step_ns'] / 1e6:.2f} ms", shown, flush=True)


if __name__ == "__main__":
    main()
