"""How long `dp.parallelize` takes, all in all, and what it chooses.

Run: `python -m experiments.gpu.parallelize --out FILE [WORKLOAD ...]`. Workloads one after another,
each in a process of its own, without what was measured for it before (the links' probe is kept).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from experiments.gpu.training import Settings, build, prepare_torch, sgd

import devplace as dp
from devplace.machine import detect
from devplace.tune.calibration_store import kept_calibration
from devplace.tune.step_timing import median_ns, time_steps

WORKLOADS = ("nmt-4", "rnnlm")


def measure(name: str, budget: str) -> dict[str, Any]:
    """One call, and the time of the step that it gives."""
    settings = Settings(name)
    prepare_torch(settings)
    workload = build(settings)
    optimizer = sgd(workload.model)
    said: list[str] = []
    begin = time.perf_counter()

    def tell(text: str) -> None:
        said.append(f"{time.perf_counter() - begin:.1f} s: {text}")
        print(name, said[-1], flush=True)

    step = dp.parallelize(
        workload.model,
        workload.inputs,
        workload.loss_fn,
        optimizer,
        budget=budget,
        progress=tell,
    )
    seconds = time.perf_counter() - begin
    rounds = time_steps(lambda: step(*workload.inputs), torch.cuda.synchronize, 2.0)
    print(step, flush=True)
    kept = kept_calibration(detect())
    return {
        "workload": name,
        "budget": budget,
        "seconds": round(seconds, 1),
        "step_ns": median_ns(rounds),
        "round_ns": list(rounds),
        "said": said,
        "report": str(step),
        "calibration": msgspec.to_builtins(kept) if kept else None,
    }


def main() -> None:
    """All workloads, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--here", action="store_true", help="measure one in this process")
    options = parser.parse_args()
    if options.here:
        found = measure(options.workloads[0], options.budget)
        options.out.write_text(json.dumps(found) + "\n")
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads:
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", "experiments.gpu.parallelize", "--here"]
            command += ["--out", str(file), "--budget", options.budget, name]
            done = subprocess.run(command, env=dict(os.environ), check=False)
            error = {"workload": name, "exit_code": done.returncode}
            rows.append(json.loads(file.read_text()) if file.exists() else error)
            data = {
                "card": torch.cuda.get_device_name(0),
                "gpus": torch.cuda.device_count(),
                "torch": str(torch.__version__),
                "rows": rows,
            }
            options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
