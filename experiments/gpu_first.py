"""Step time of workloads on one GPU and on two with the search's plan, beside the prediction.

Run: `python experiments/gpu_first.py NAME --out FILE [--budget 15s] [--devices 1,2]`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from devplace import placers, workloads
from devplace.cost.analytic import Analytic
from devplace.machine import detect
from devplace.problem import Problem
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.cuda import CudaExecutor
from devplace.run.state import ModelState
from devplace.schedule import make_schedule
from devplace.step_capture import capture

STEPS = 20


def milliseconds(run: Callable[[int], Any], wait: Callable[[], Any]) -> float:
    """Mean time of a step over STEPS steps, after three others, ms."""
    for k in range(3):
        run(k)
    wait()
    begin = time.perf_counter()
    for k in range(STEPS):
        run(k)
    wait()
    return (time.perf_counter() - begin) / STEPS * 1e3


def measure(graph: Any, workload: Any, optimizer: Any, plan: Any, used: int) -> dict[str, Any]:
    """Step times of a plan, one step after another and each waited for."""
    schedule = make_schedule(graph, plan.placement, plan.order, plan.device_names)
    executor = CudaExecutor(schedule, 0, waits=False)
    for op, value in ModelState(graph, workload.model, optimizer).read().items():
        executor.put(op, value)
    batch = bind_inputs(graph, workload.inputs, {})

    def feed(number: int) -> None:
        scalars = bind_scalars(graph, number, optimizer.param_groups)
        for op, value in {**batch, **scalars}.items():
            executor.put(op, value)

    def fed_step(number: int) -> Any:
        feed(number + 1)
        return executor.step(number + 1)

    def waited_step(number: int) -> float:
        loss = fed_step(number).results
        return float(next(iter(loss.values())))

    begin = time.perf_counter()
    first_loss = waited_step(0)
    ready_s = time.perf_counter() - begin
    row = {
        "mode": executor.mode,
        "reason": executor.reason,
        "first_step_s": round(ready_s, 1),
        "loss": first_loss,
        "step_ms": milliseconds(lambda k: executor.step(k + 1), executor.synchronize),
        "fed_ms": milliseconds(fed_step, executor.synchronize),
        "waited_ms": milliseconds(waited_step, executor.synchronize),
        "transfers": len(schedule.transfers),
        "transfer_bytes": sum(transfer.num_bytes for transfer in schedule.transfers),
        "joins": sum(map(len, getattr(executor._runner, "_joins", {}).values())),
        "peak_gib": [round(torch.cuda.max_memory_reserved(k) / 2**30, 2) for k in range(used)],
    }
    executor.close()
    return row


def main() -> None:
    """Measure one workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", default="gpu_first.json")
    parser.add_argument("--budget", default="15s")
    parser.add_argument("--devices", default="1,2")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    workload = workloads.build(options.name, size="full", device="cuda:0")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
    begin = time.perf_counter()
    graph = capture(workload.model, workload.inputs, workload.loss_fn, optimizer, name=options.name)
    machine = detect()
    data: dict[str, Any] = {
        "workload": options.name,
        "card": torch.cuda.get_device_name(0),
        "ops": len(graph.ops),
        "capture_s": round(time.perf_counter() - begin, 1),
        "rows": [],
    }
    costs = Analytic()(graph, machine)
    for used in map(int, options.devices.split(",")):
        keep = {f"cuda:{k}" for k in range(used)}
        outside = [name for name in machine.device_names if name not in keep]
        problem = Problem(graph, machine, costs, exclude=outside)
        placer = placers.Single() if used == 1 else placers.Search()
        result = placers.place(problem, placer, options.budget, 0, allow_infeasible=True)
        row = {
            "devices": used,
            "placer": result.placer,
            "predicted_ms": result.step_ns / 1e6,
            "evaluations": result.evaluations,
            "bound_ms": result.bound.step_ns / 1e6,
        }
        try:
            row |= measure(graph, workload, optimizer, result.plan, used)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        torch.cuda.empty_cache()
        data["rows"].append(row)
        print(json.dumps(row), flush=True)
        Path(options.out).write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
