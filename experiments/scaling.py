"""Time and memory of the search from 1,000 to 200,000 ops, on 2 to 64 devices.

Graphs are those of `devplace.testing.layered`. Every size is searched under budgets of time that
double; the time to reach a plan is the shortest budget that gives one within 2 % of the best of
all. Writes docs/results/scaling.json and scaling.svg; the table is made by `tables.py`. Run:
`python experiments/scaling.py [--quick]`, some 12 minutes on 2 cores, or 2.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, provenance, write
from plot import Line, log_plot

from devplace import placers
from devplace.placers.annealing import CoolingSchedule
from devplace.placers.budget import Budget
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.local_search.classes import BestPlacement
from devplace.placers.local_search.explore import Explorer
from devplace.placers.local_search.search import Search
from devplace.testing.layered import layered_problem

SIZES = (1_000, 5_000, 20_000, 60_000, 200_000)
QUICK_SIZES = (1_000, 4_000, 16_000)
DEVICES = (2, 8, 64)
# Budgets, s per 1,000 ops; small problems get those of 10,000 ops.
BUDGETS = (0.02, 0.04, 0.08, 0.16, 0.32)
WITHIN = 1.02


def bytes_per_op_and_thread(num_ops: int, num_devices: int) -> float:
    """What every chain beyond the first adds to the largest memory of a process, per op."""
    # large pieces are mapped one by one, so what was freed before hides nothing
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    peaks = []
    for chains in (1, 5):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peaks.append(pool.submit(_bytes_of_chains, num_ops, num_devices, chains).result())
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return (peaks[1] - peaks[0]) / 4 / num_ops


def _bytes_of_chains(num_ops: int, num_devices: int, chains: int) -> int:
    problem = layered_problem(num_ops, num_devices)
    level = Search()._levels(problem, Budget())[-1]
    start = BestPlacement(np.zeros(problem.core.tasks.num_groups, np.int32), 0, 0)
    evaluate = Evaluator(problem, Budget(), threads=chains)
    explorer = Explorer(problem, evaluate, np.random.default_rng(0), chains)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest memory so far
    before = _memory_bytes("VmHWM")
    schedule = CoolingSchedule(0.005, 0.3, 400, 400, 0.0)
    explorer.run(level, [start], list(problem.usable_devices), 1.0, schedule)
    return _memory_bytes("VmHWM") - before


def _memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def rows(num_ops: int, num_devices: int) -> list[dict[str, Any]]:
    """One size under all budgets."""
    begin = time.monotonic()
    problem = layered_problem(num_ops, num_devices)
    made_s = time.monotonic() - begin
    memory = bytes_per_op_and_thread(num_ops, num_devices)
    found = []
    for part in BUDGETS:
        budget = Budget(seconds=part * max(num_ops, 10_000) / 1000)
        begin = time.monotonic()
        result = placers.place(problem, Search(), budget, 0)
        found.append(
            {
                "ops": len(problem.graph.ops),
                "devices": num_devices,
                "budget_s": budget.seconds,
                "seconds": round(time.monotonic() - begin, 2),
                "evaluations": result.evaluations,
                "step_ns": result.step_ns,
                "lower_bound_ns": result.bound.step_ns,
                "problem_s": round(made_s, 2),
                "bytes_per_op_and_thread": round(memory, 1),
            }
        )
    return found


def time_to_reach(found: list[dict[str, Any]]) -> float:
    """The shortest budget within 2 % of the best, s."""
    best = min(row["step_ns"] for row in found)
    return min(float(row["budget_s"]) for row in found if row["step_ns"] <= WITHIN * best)


def main() -> None:
    """Run all sizes; the result is written after every one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 16,000 ops")
    parser.add_argument("--note", default="", help="a sentence for the table")
    options = parser.parse_args()
    data: dict[str, Any] = {"provenance": provenance(), "note": options.note, "rows": []}
    for num_ops in QUICK_SIZES if options.quick else SIZES:
        for num_devices in DEVICES:
            found = rows(num_ops, num_devices)
            data["rows"] += found
            write("scaling", data)
            print(num_ops, num_devices, time_to_reach(found), found[-1], flush=True)
    lines = []
    for num_devices in DEVICES:
        own = [row for row in data["rows"] if row["devices"] == num_devices]
        sizes = dict.fromkeys(row["ops"] for row in own)
        times = [time_to_reach([row for row in own if row["ops"] == ops]) for ops in sizes]
        lines.append(Line(f"{num_devices} devices", list(sizes), times))
    (RESULTS / "scaling.svg").write_text(log_plot(lines, "ops", "s to within 2 % of the best"))


if __name__ == "__main__":
    main()
