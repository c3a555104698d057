"""What the planning of every small workload gave when it was last stated.

Run: `python -m tests.replay` writes tests/replay.json anew. A change that moves it says so.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

import devplace as dp
from devplace import placers, workloads
from devplace.graph.serialize import fingerprint
from devplace.placers.simple.single import Single

FILE = Path(__file__).with_name("replay.json")
MACHINE = "h100x2"
BUDGET = "200ev"
SEED = 0


def versions() -> dict[str, str]:
    """What a captured graph depends on beside the code."""
    return {"torch": torch.__version__.partition("+")[0]}


def digest(plan: dp.Plan) -> str:
    """Of the device of every op, and the order on each device."""
    text = json.dumps([plan.placement, plan.order])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def replayed(name: str) -> dict[str, Any]:
    """Graphs, predictions and plans of one workload, plain and fused."""
    workload = workloads.build(name, size="small", device="meta")
    model, machine = workload.model, dp.load_machine(MACHINE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, Any] = {}
    for form in ("plain", "fused"):
        graph = dp.capture(
            model, workload.inputs, workload.loss_fn, optimizer, name=name, fuse=form == "fused"
        )
        problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
        single = dp.place(problem, Single(), "9ev", seed=SEED)
        search = dp.place(problem, placers.Search(), BUDGET, seed=SEED)
        found[form] = {
            "graph": fingerprint(graph)[:16],
            "ops": len(graph.ops),
            "single_ns": single.step_ns,
            "search_ns": search.step_ns,
            "search_plan": digest(search.plan),
            "search_peak": search.plan.predicted.peak_bytes,
            "bound_ns": search.bound.step_ns,
        }
    return found


def main() -> None:
    """Write the file."""
    made = {"versions": versions(), "workloads": {n: replayed(n) for n in workloads.NAMES}}
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
