"""Pipelines of micro-batches: what `search` finds beside the plans that it begins with.

Run: `python experiments/micro_batches.py` (hours on a busy core: graphs of up to 18,000 ops and
20,000 simulations; rows that are there are kept, `--graphs DIR` keeps captured graphs) writes
docs/results/micro_batches.json; `tables.py` makes the page. With `--before COMMIT` and an older
devplace on the path, only its `search` is run, beside the other rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, capture_workload, provenance, write

import devplace as dp
from devplace.graph import OpGraph
from devplace.graph.serialize import load, save
from devplace.placers import Budget, Evaluator, Search, place

NAME = "micro_batches"
WORKLOADS = ("bert-base", "vit-b-16", "gpt-2", "llama")
PARTS = (4, 8)
BUDGETS = (4_000, 20_000)
MACHINE = "h100x4"
SEED = 0


def main() -> None:
    """Search every step with every budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--before", default="")
    options = parser.parse_args()
    cases = [(n, p, b) for b in BUDGETS for p in PARTS for n in WORKLOADS]
    for name, parts, evaluations in cases:
        kind = "before" if options.before else "rows"
        data = _known()
        known = {(r["workload"], r["parts"], r["evaluations"]) for r in data.get(kind, [])}
        if (name, parts, evaluations) in known:
            continue
        graph, machine = _graph(name, parts, options.graphs), dp.load_machine(MACHINE)
        problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
        row = {"workload": name, "parts": parts, "evaluations": evaluations, "ops": len(graph.ops)}
        began = time.monotonic()
        result = place(problem, Search(least_gain=0.0), f"{evaluations}ev", seed=SEED)
        row |= {"step_ns": result.step_ns, "bound_ns": result.bound.step_ns}
        row["seconds"] = round(time.monotonic() - began, 1)
        if options.before:
            data["before_commit"] = options.before
        else:
            row["starts"] = _starts(problem)
        data = {**_known(), **{k: v for k, v in data.items() if k == "before_commit"}}
        data |= {"machine": MACHINE, "seed": SEED, "provenance": provenance()}
        data[kind] = [*data.get(kind, []), row]
        write(NAME, data)
        print(kind, name, parts, evaluations, result.step_ns / 1e6, row["seconds"], flush=True)


def _starts(problem: dp.Problem) -> dict[str, int]:
    """Step of the best of each kind of start."""
    from devplace.placers.local_search.starts import Starts

    evaluate = Evaluator(problem, Budget(evaluations=10**6))
    starts = Starts(problem, evaluate, np.random.default_rng(SEED))
    starts.single_devices()
    starts.cheap_placers()
    best: dict[str, int] = {}
    for heading, found in zip(starts.headings, starts.found, strict=True):
        if found.overflow_bytes == 0:
            best[heading] = min(found.step_ns, best.get(heading, found.step_ns))
    return dict(sorted(best.items(), key=lambda pair: pair[1]))


def _known() -> dict[str, Any]:
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _graph(name: str, parts: int, folder: Path | None) -> OpGraph:
    path = folder / f"{name}_{parts}.json" if folder else None
    if path is not None and path.exists():
        return load(path)
    graph: OpGraph = capture_workload(name, micro_batches=parts)
    if path is not None:
        save(graph, path)
    return graph


if __name__ == "__main__":
    main()
