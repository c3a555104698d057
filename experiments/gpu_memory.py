"""Predicted peak memory beside the measured one, and whether "fits" and "does not fit" hold.

Run: `python experiments/gpu_memory.py --out FILE`. One process per model; they run side by side.
Limits are set by `torch.cuda.set_per_process_memory_fraction`: on what torch reserves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from devplace import placers, workloads
from devplace.cost.profiled import Profiled
from devplace.errors import DeviceMemoryError
from devplace.machine import detect
from devplace.problem import Problem
from devplace.report.measured_memory import measured_memory_rows
from devplace.run import compile_step
from devplace.run.cuda.device_memory import held_bytes
from devplace.step_capture import capture

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nmt": ("nmt-2", {"seq": 20}),
    "bert": ("bert-base", {"batch": 32, "layers": 6}),
    "resnet": ("resnet-50", {"batch": 64}),
    "rnnlm": ("rnnlm", {"seq": 20}),
    "gpt": ("gpt-2", {"batch": 4, "layers": 6}),
}
SEARCHED = ("nmt", "bert")
SHARE_OF_ONE = 0.75  # of one GPU's peak is what each of two may hold of a searched plan
STEPS = 2
TOO_MUCH = 1.051  # predicted peak over the limit where a plan must fail


def child(name: str, out: Path) -> None:
    """All cases of one model."""
    torch.set_float32_matmul_precision("high")
    workload_name, settings = MODELS[name]
    begin = time.perf_counter()
    workload = workloads.build(workload_name, device="cuda:0", **settings)
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=1e-3)
    graph = capture(workload.model, workload.inputs, workload.loss_fn, optimizer, name=name)
    workload.model.to("cpu")
    inputs = torch.utils._pytree.tree_map(lambda x: x.cpu(), workload.inputs)
    torch.cuda.empty_cache()
    machine = detect()
    held = np.zeros(len(machine.devices), np.int64)
    per_gpu = held_bytes("cuda:0")
    for index, device in enumerate(machine.device_names):
        if device.startswith("cuda"):
            held[index] = per_gpu
    costs = replace(Profiled(skip=("cpu:0",))(graph, machine), held_bytes=held, has_gaps=True)
    data: dict[str, Any] = {
        "model": name,
        "ops": len(graph.ops),
        "capture_s": round(time.perf_counter() - begin, 1),
        "held_bytes": held.tolist(),
        "peaks": [],
        "verdicts": [],
    }
    plans = {1: plan(graph, machine, costs, name, 1)}
    if torch.cuda.device_count() > 1:
        most = round(SHARE_OF_ONE * max(plans[1].predicted.peak_bytes.values()))
        plans[2] = plan(graph, machine, costs, name, 2, most)
    peaks = {n: max(made.predicted.peak_bytes.values()) for n, made in plans.items()}

    def run(used: int, limit_bytes: int | None) -> dict[str, Any]:
        return run_case(workload.model, optimizer, graph, inputs, plans[used], limit_bytes)

    for used in plans:
        data["peaks"].append({"gpus": used, **run(used, None)})
        save(out, data)
    cases = [(1, peaks[1])]
    if 2 in plans:
        cases += [(1, peaks[2]), (2, peaks[2]), (2, round(peaks[2] / TOO_MUCH))]
    else:
        cases += [(1, round(peaks[1] / TOO_MUCH))]
    for used, limit in cases:
        should_run = peaks[used] <= limit
        case = run(used, limit)
        row = {"gpus": used, "limit_bytes": limit, "predicted_bytes": peaks[used]}
        row |= {"should_run": should_run, "is_right": case["ran"] == should_run, **case}
        data["verdicts"].append(row)
        save(out, data)
    data["seconds"] = round(time.perf_counter() - begin, 1)
    save(out, data)


def plan(
    graph: Any, machine: Any, costs: Any, name: str, used: int, limit_bytes: int | None = None
) -> Any:
    """A plan for that many GPUs, with no more than so many bytes on each if it is searched for."""
    keep = {f"cuda:{k}" for k in range(used)}
    problem = Problem(
        graph,
        machine,
        costs,
        limits=dict.fromkeys(keep, limit_bytes) if limit_bytes and name in SEARCHED else {},
        exclude=[d for d in machine.device_names if d not in keep],
    )
    if used == 1:
        return placers.place(problem, placers.Single(), "5s", 0, allow_infeasible=True).plan
    placer = placers.Search() if name in SEARCHED else placers.Even()
    return placers.place(problem, placer, "4s", 0, allow_infeasible=True).plan


def run_case(
    model: Any, optimizer: Any, graph: Any, inputs: Any, made: Any, limit_bytes: int | None
) -> dict[str, Any]:
    """Run a plan under a limit on every GPU (None: without), and give all memory back."""
    predicted = {d: int(b) for d, b in made.predicted.peak_bytes.items() if b}
    gpus = [d for d in predicted if d.startswith("cuda")]
    for gpu in gpus:
        total = torch.cuda.get_device_properties(gpu).total_memory
        share = 1.0 if limit_bytes is None else limit_bytes / total
        torch.cuda.set_per_process_memory_fraction(share, gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    found: dict[str, Any] = {"ran": False}
    begin = time.perf_counter()
    step = None
    try:
        step = compile_step(
            model,
            optimizer,
            graph,
            made.placement,
            made.order,
            made.device_names,
            predicted_bytes=predicted,
        )
        for _ in range(STEPS):
            loss = float(step(*inputs))
        found = {"ran": True, "loss": loss, **measured(step.executor, predicted)}
    except DeviceMemoryError as error:
        found["error"] = str(error)
    except Exception as error:
        found["unexpected"] = f"{type(error).__name__}: {error}"[:600]
    if step is not None:
        step.close()
    del step
    for gpu in gpus:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    after = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    found["left_bytes"] = [b - a for a, b in zip(before, after, strict=True)]
    found["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def measured(executor: Any, predicted: dict[str, int]) -> dict[str, Any]:
    """What a step that ran took; the most that a device reserved is what a limit would count."""
    memory = executor.measured_memory()
    rows = measured_memory_rows(predicted, memory)
    for row, found in zip(rows, memory, strict=True):
        row["reserved_after_bytes"] = found.reserved_bytes
        row["allocated_after_bytes"] = found.allocated_bytes
    return {"mode": executor.mode, "reason": executor.reason, "rows": rows}


def save(out: Path, data: dict[str, Any]) -> None:
    """Write what there is so far."""
    out.write_text(json.dumps(data, indent=1) + "\n")


def summary(data: dict[str, Any]) -> dict[str, Any]:
    """Errors of the predicted peaks and how many verdicts were right."""
    rows = [
        row for model in data["models"] for peak in model["peaks"] for row in peak.get("rows", [])
    ]
    errors = sorted(abs(row["error"]) for row in rows)
    waste = [
        row["reserved_peak_bytes"] / row["step_peak_bytes"] - 1
        for row in rows
        if row["step_peak_bytes"]
    ]
    verdicts = [verdict for model in data["models"] for verdict in model["verdicts"]]
    return {
        "median_error": float(np.median(errors)) if errors else None,
        "worst_error": errors[-1] if errors else None,
        "worst_fragmentation": max(waste, default=None),
        "right": sum(verdict["is_right"] for verdict in verdicts),
        "cases": len(verdicts),
    }


def main() -> None:
    """Start a process per model and put their results together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_memory.json")
    parser.add_argument("--model", default="")
    parser.add_argument("--limit-s", type=float, default=60.0)
    options = parser.parse_args()
    if options.model:
        child(options.model, Path(options.out))
        return
    data: dict[str, Any] = {
        "card": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "provenance": f"{torch.cuda.device_count()} {torch.cuda.get_device_name(0)}, torch "
        f"{torch.__version__}, Adam, profiled costs, seed 0, commit "
        f"{os.environ.get('COMMIT', 'unknown')}, `python experiments/gpu_memory.py`.",
        "models": [],
    }
    deadline = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name in MODELS:
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, __file__, "--model", name, "--out", str(file)]
            running[name] = (file, subprocess.Popen(command))
        for name, (file, process) in running.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            found = (
                json.loads(file.read_text())
                if file.exists()
                else {"model": name, "peaks": [], "verdicts": []}
            )
            data["models"].append({**found, "exit_code": process.returncode})
    data["summary"] = summary(data)
    save(Path(options.out), data)
    print(json.dumps(data["summary"]))


if __name__ == "__main__":
    main()
