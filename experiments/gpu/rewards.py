"""Post and HDP with real step times as reward, beside the same with simulated ones.

Every placement that a placer draws is run on the GPUs by one of some processes; only one of them
uses the GPUs at a time. The best placements of both kinds of reward, the expert's split and the
search's plan are then measured alone. Writes one JSON. Run:
`python -m experiments.gpu.rewards --out FILE [--workload nmt-4] [--gpus 4] [--samples 320]
[--limit 600] [--workers 3] [--others 0s]`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from experiments.gpu.training import Settings, build, prepare_torch, sgd

from devplace import placers
from devplace.machine import detect
from devplace.placers import Budget
from devplace.problem import Problem
from devplace.step_capture import capture
from devplace.tune.measure import Measurer, Trial
from devplace.tune.measured_costs import measured_machine, price
from devplace.tune.rewards import MeasuredSteps
from devplace.tune.step_sources import step_sources


class Run:
    """One workload on the GPUs of this machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        settings = Settings(options.workload, number_format=options.number_format)
        prepare_torch(settings)
        workload = build(settings)
        optimizer = sgd(workload.model)
        self.graph = capture(
            workload.model, workload.inputs, workload.loss_fn, optimizer, name=options.workload
        )
        self.sources = step_sources(self.graph, workload.model, optimizer, workload.inputs)
        machine = measured_machine(detect())
        costs = price(self.graph, machine, ("cpu:0",))
        keep = {f"cuda:{k}" for k in range(options.gpus)}
        outside = [name for name in machine.device_names if name not in keep]
        self.problem = Problem(self.graph, machine, costs, exclude=outside)
        self.data: dict[str, Any] = {
            "workload": options.workload,
            "gpus": options.gpus,
            "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
            "cores": len(os.sched_getaffinity(0)),
            "workers": options.workers,
            "rows": [],
            "best": [],
        }

    def learn(self, name: str) -> None:
        """One placer with measured rewards; its best placement is measured again alone."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            lock = str(Path(folder, "lock"))
            measurers = [
                stack.enter_context(Measurer(self.options.seconds, lock=lock))
                for _ in range(self.options.workers)
            ]
            steps = MeasuredSteps(self.problem, self.sources, *measurers)
            begin = time.perf_counter()
            found = placers.place(
                self.problem,
                placers.by_name(name),
                Budget(seconds=self.options.limit, evaluations=self.options.samples),
                0,
                allow_infeasible=True,
                measure=steps,
            )
            seconds = time.perf_counter() - begin
        failed = [m.kind for m in steps.measurements if m.step_ns is None]
        self.data["rows"].append(
            {
                "placer": name,
                "evaluations": found.evaluations,
                "measured": len(steps.measurements),
                "failed": failed,
                "seconds": round(seconds, 1),
                "history": [[count, ns] for count, _, ns in found.history],
                "measured_ns": [m.step_ns for m in steps.measurements],
                "predicted_ns": steps.predicted_ns,
            }
        )
        last = {k: v for k, v in self.data["rows"][-1].items() if not k.endswith("ed_ns")}
        print(last, flush=True)
        self.save()
        self.again(f"{name}, measured", found)

    def simulate(self, name: str, budget: str) -> None:
        """The same with simulated rewards; the result is measured."""
        found = placers.place(self.problem, placers.by_name(name), budget, 0, allow_infeasible=True)
        self.again(f"{name}, simulated, {found.evaluations}", found)

    def again(self, name: str, found: placers.Result) -> None:
        """Measure one result with nothing beside it."""
        with Measurer(1.0) as measurer:
            measured = measurer.measure(Trial(name, found.plan, self.graph, self.sources))
        row = {
            "name": name,
            "predicted_ns": found.step_ns,
            "measured_ns": measured.step_ns,
            "error": measured.error,
        }
        self.data["best"].append(row)
        print(row, flush=True)
        self.save()

    def save(self) -> None:
        """Write everything so far."""
        Path(self.options.out).write_text(json.dumps(self.data, indent=1) + "\n")


def main() -> None:
    """Measure one workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--workload", default="nmt-4")
    parser.add_argument("--number-format", default="tf32")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--placers", default="post,hdp")
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each placer")
    parser.add_argument("--workers", type=int, default=3, help="processes that prepare steps")
    parser.add_argument("--seconds", type=float, default=0.3, help="to time each placement")
    parser.add_argument("--others", default="20s", help="budget of search; 0s: learners alone")
    options = parser.parse_args()
    run = Run(options)
    if options.others != "0s":
        run.simulate("layers", "1ev")
        run.simulate("search", options.others)
    for name in options.placers.split(","):
        run.learn(name)
    for name in options.placers.split(","):
        run.simulate(name, f"{options.samples}ev")


if __name__ == "__main__":
    main()
