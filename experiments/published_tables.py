"""The result tables of HDP and of Mars, rebuilt: every system on the same budget of evaluations.

Workloads and numbers of devices are those of the papers (Mirhoseini et al. 2018, table 1; Lan et
al. 2021, as in its authors' slides), on the `k40` machines with analytic costs; the rows of Mars
have a memory limit that one GPU does not keep. Beside each system are random sampling and a climber
that place the same groups on the same devices (`random-64` and `climb-64`: the groups of most
systems; `random-all` and `climb-all`: every colocation group, as HDP), and systems with the
settings that were published (`STRICT`).

Writes docs/results/published_tables.json after each run, which has the number of the machine,
versions and commit that it was made with. A run that is in the file already is not done again; with
`--again` it is, and kept under `repeated` beside the first. Tables and pictures are made from the
file by `tables.py`. Run:
`python experiments/published_tables.py [--budget 2400ev] [--seeds 0,1,2,3,4] [--workers 2]
[--rows nmt-4,gnmt-4] [--placers post,mars] [--graphs FOLDER] [--again]`.
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

from common import RESULTS, capture_workload, named_placer, provenance, write

from devplace import placers
from devplace.cost.analytic import Analytic
from devplace.graph import serialize
from devplace.machine import load_machine
from devplace.problem import Problem
from devplace.research.grouping import at_most
from devplace.research.hdp import Hdp
from devplace.research.mars import Mars
from devplace.research.placeto import Placeto
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
GROUPS = 64
"""Most groups of all systems but HDP."""
PLAIN: dict[str, placers.Placer] = {
    "random-64": placers.Random("random-64", GROUPS),
    "random-all": placers.Random("random-all"),
    "climb-64": placers.Climb("climb-64", GROUPS),
    "climb-all": placers.Climb("climb-all", 0),
}
OTHER_RULES: dict[str, placers.Placer] = {
    "climb-64-constant": placers.Climb("climb-64-constant", GROUPS, "constant"),
    "climb-64-per-gb": placers.Climb("climb-64-per-gb", GROUPS, "per GB"),
    "climb-all-constant": placers.Climb("climb-all-constant", 0, "constant"),
}
"""The climber with the other memory rules of the systems, on rows where a limit binds."""
STRICT: dict[str, placers.Placer] = {
    "hdp-strict": Hdp(
        "hdp-strict",
        learning_rate=0.1,
        temperature=10.0,
        noise=0.5,
        grouper_gain=1.0,
        baseline_decay=0.9,
        entropy_weight=0.0,
        failing_s=100.0,
    ),
    "placeto-per-step": Placeto("placeto-per-step", reward="improvement"),
    "placeto-strict": Placeto(
        "placeto-strict",
        reward="improvement",
        learning_rate=1e-3,
        last_learning_rate=1e-4,
        entropy_weight=1.0,
    ),
    "mars-every-op": Mars("mars-every-op", groups=0, segment=128),
}
"""Systems with what is published of their settings in place of what was tuned here."""
STRICT_ROWS = {
    "hdp-strict": ("rnnlm", "nmt-2", "nmt-4"),
    "placeto-per-step": PARTS_ROWS,
    "placeto-strict": PARTS_ROWS,
    "mars-every-op": ("inception-v3",),
}
KINDS = PLAIN | OTHER_RULES | STRICT


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
        wanted = [*FIXED, "search", *PLAIN, *SYSTEMS, *VARIANTS]
        wanted += PARTS if row.workload in PARTS_ROWS else ()
        wanted += OTHER_RULES if row.limit else ()
        wanted += [name for name, where in STRICT_ROWS.items() if row.workload in where]
        for name in wanted:
            if names is None or name in names:
                for seed in seeds[:1] if name in FIXED else seeds:
                    yield Job(row, name, seed, budget)


def save_graph(workload: str, folder: str) -> None:
    """Capture a workload's step into `folder`, unless it is there."""
    path = Path(folder, f"{workload}.json")
    if not path.exists():
        path.write_bytes(serialize.to_json(capture_workload(workload)))


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


def space_of(row: Row, folder: str) -> dict[str, int]:
    """How much there is to decide: ops, colocation groups, groups of most systems, devices."""
    problem = problem_of(row, folder)
    return {
        "ops": len(problem.graph.ops),
        "colocation_groups": problem.core.tasks.num_groups,
        "groups": at_most(problem, GROUPS).num_groups,
        "devices": len(problem.usable_devices),
    }


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
        placer = KINDS.get(job.placer) or named_placer(job.placer)
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


def done_before() -> dict[str, Any]:
    """The result file, or the start of one."""
    path = RESULTS / f"{NAME}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {"runs": [], "budget": 2400, "problems": [], "rows": [], "repeated": []} | found


def main() -> None:
    """Do what is missing, several runs at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="2400ev")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rows", help="workloads, all by default")
    parser.add_argument("--placers", help="all by default")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--graphs", help="folder of captured graphs; what it lacks is captured")
    parser.add_argument("--again", action="store_true", help="repeat runs that are in the file")
    options = parser.parse_args()
    chosen = options.rows.split(",") if options.rows else [row.workload for row in ROWS]
    rows = [row for row in ROWS if row.workload in chosen]
    names = options.placers.split(",") if options.placers else None
    seeds = [int(seed) for seed in options.seeds.split(",")]
    data = done_before()
    made = provenance()
    if made not in data["runs"]:
        data["runs"].append(made)
    into = "repeated" if options.again else "rows"
    known = {
        tuple(row[name] for name in ("workload", "machine", "placer", "seed", "budget"))
        for row in data[into]
    }
    wanted = jobs(rows, names, seeds, options.budget)
    todo = sorted((job for job in wanted if job.key not in known), key=lambda job: -cost(job))
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool,
    ):
        folder = options.graphs or temporary
        workloads = dict.fromkeys(job.row.workload for job in todo)
        for captured in [pool.submit(save_graph, name, folder) for name in workloads]:
            captured.result()
        here = [row for row in ROWS if row.workload in workloads]
        spaces = [pool.submit(space_of, row, folder) for row in here]
        told = {row: space.result() for row, space in zip(here, spaces, strict=True)}
        kept = {(one["workload"], one["machine"]): one for one in data["problems"]}
        data["problems"] = [
            kept.get((row.workload, row.machine), {}) | asdict(row) | told.get(row, {})
            for row in ROWS
        ]
        for ended in as_completed([pool.submit(run, job, folder) for job in todo]):
            row = ended.result() | {"run": data["runs"].index(made)}
            data[into].append(row)
            write(NAME, data)
            shown = {k: row[k] for k in ("workload", "machine", "placer", "seed", "cpu_s")}
            print(f"{row['step_ns'] / 1e6:.2f} ms", shown, flush=True)


if __name__ == "__main__":
    main()
