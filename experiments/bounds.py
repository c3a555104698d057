"""How far plans are from the lower bound, and which part of that transfers make.

Writes docs/results/bounds.json; the page is made from it by `tables.py`. Steps are those that
`devplace plan` makes for the machine. Each is searched as it is, and with transfers that take no
time: what a bound that leaves transfers out can reach at most. Small recurrent nets are given to
`exact` as well, in seconds of this computer. Run: `python experiments/bounds.py [--graphs DIR]`
(half an hour; rows that are there are kept, `--graphs` keeps captured graphs). With `--before
COMMIT` and an older devplace on the path, only its search is run, beside the other rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
from common import RESULTS, capture_workload, provenance, write

import devplace as dp
from devplace.auto.planning import find_target
from devplace.graph.serialize import load, save
from devplace.placers import Search, place
from devplace.placers.exact.exact import Exact
from devplace.simulator.bounds import LowerBound, lower_bound
from devplace.testing import hand_problem

NAME = "bounds"
WORKLOADS = ("rnnlm", "nmt-4", "gnmt-4", "bert-large")
MACHINES = ("h100x4", "k40x4")
SEEDS = (0,)
EVALUATIONS, FREE_EVALUATIONS = 40_000, 10_000
# Devices, time steps and ns of a product; a product of RNNLM's step takes 28 us on an H100.
NETS = ((2, 3, 28_000), (2, 4, 28_000), (2, 4, 12_000), (4, 3, 28_000), (4, 4, 28_000))
CELL_NS, STATE_BYTES, NET_SECONDS = 5_000, 262_144, 60


def main() -> None:
    """Search every step, then the small nets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--before", default="")
    options = parser.parse_args()
    key = "before" if options.before else "rows"
    for seed in SEEDS:
        for machine in MACHINES:
            for name in WORKLOADS:
                case = {"workload": name, "machine": machine, "seed": seed}
                if any(case.items() <= row.items() for row in _known().get(key, [])):
                    continue
                problem = _problem(name, machine, options.graphs)
                row = case | _searched(problem, EVALUATIONS, seed)
                if not options.before and seed == SEEDS[0]:
                    row["free"] = _searched(_free(problem), FREE_EVALUATIONS, seed)
                _add(key, row, options.before)
    if not options.before:
        for net in NETS[len(_known().get("nets", [])) :]:
            _add("nets", _small(*net), "")


def _searched(problem: dp.Problem, evaluations: int, seed: int) -> dict[str, Any]:
    """The plan of a search, and the bounds."""
    bound = lower_bound(problem)
    result = place(problem, Search(least_gain=0.0), f"{evaluations}ev", seed, bound=bound)
    return {
        "tasks": problem.core.tasks.num_tasks,
        "evaluations": evaluations,
        "step_ns": result.step_ns,
        "transfers": len(result.timeline.transfers),
        **_parts(bound),
    }


def _parts(bound: LowerBound) -> dict[str, int]:
    return {
        "path_ns": bound.critical_path_ns,
        "load_ns": bound.load_ns,
        "bound_ns": bound.step_ns,
    }


def _free(problem: dp.Problem) -> dp.Problem:
    """The same with transfers that take no time of links or devices."""
    free = {"latency_ns": 0, "bytes_per_s": 10**18, "points": (), "channels": (), "parallel": True}
    free |= {"send_overhead_ns": 0, "receive_overhead_ns": 0, "send_share": 0, "receive_share": 0}
    links = tuple(msgspec.structs.replace(link, **free) for link in problem.machine.links)
    return dataclasses.replace(problem, machine=dataclasses.replace(problem.machine, links=links))


def _small(devices: int, steps: int, product_ns: int) -> dict[str, Any]:
    """A forward pass of two recurrent layers, by `exact` and by `search`."""
    machine, lines = dp.load_machine(f"h100x{devices}"), []
    for t in range(steps):
        lines.append(f"h0_{t} = embed ns=1000 bytes={STATE_BYTES}")
        for layer in (1, 2):
            cell = [f"x{layer}_{t} = mm(h{layer - 1}_{t})"]
            if t:
                cell.append(f"s{layer}_{t} = mm(h{layer}_{t - 1})")
            lines += [f"{product} ns={product_ns} bytes={4 * STATE_BYTES}" for product in cell]
            made = ", ".join(product.partition(" ")[0] for product in cell)
            lines.append(f"h{layer}_{t} = cell({made}) ns={CELL_NS} bytes={STATE_BYTES}")
    problem = hand_problem("\n".join(lines), machine, exclude=["cpu:0"])
    bound = lower_bound(problem)
    searched = place(problem, Search(least_gain=0.0), f"{FREE_EVALUATIONS}ev", 0, bound=bound)
    exact = place(problem, Exact(), f"{NET_SECONDS}s", 0, bound=bound)
    return {
        "devices": devices,
        "product_ns": product_ns,
        "tasks": problem.core.tasks.num_tasks,
        "seconds": NET_SECONDS,
        "search_ns": searched.step_ns,
        "exact_ns": exact.step_ns,
        "proved_ns": exact.bound.step_ns,
        **_parts(bound),
    }


def _problem(name: str, machine: str, folder: Path | None) -> dp.Problem:
    target = find_target(machine)
    path = folder / f"{name}_{'fused' if target.fuse else 'plain'}.json" if folder else None
    if path is not None and path.exists():
        return target.problem(load(path))
    graph = capture_workload(name, fuse=target.fuse, stack_gradients=target.fuse)
    if path is not None:
        save(graph, path)
    return target.problem(graph)


def _known() -> dict[str, Any]:
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _add(key: str, row: dict[str, Any], before: str) -> None:
    """Write a row, beside what another run may have written meanwhile."""
    data = _known()
    data[key] = [*data.get(key, []), row]
    data |= {"before_commit": before} if before else {"provenance": provenance()}
    write(NAME, data)
    print(key, row, flush=True)


if __name__ == "__main__":
    main()
