"""Step times of one plan run by several processes, a GPU each, and by one process with all GPUs.

    torchrun --nproc-per-node 2 experiments/gpu/processes.py nmt-4 bert-large -o processes.json

With NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 loopback sockets stand for a network between hosts.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experiments.common import provenance
from experiments.gpu.timing import time_steps

import devplace as dp
from devplace import placers, workloads
from devplace.plan.plan import plan_from_json
from devplace.run.compile import compile_step

SECONDS = 20.0
STEPS = 50
NCCL_SETTINGS = (
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NET"),
    "NCCL_GRAPH_MIXING_SUPPORT",
)


def share(text: str) -> str:
    """What rank 0 gives, in all processes."""
    lines = [text]
    dist.broadcast_object_list(lines)
    return lines[0]


def measure(name: str, machine: dp.Machine, budget: str, seed: int) -> dict[str, Any]:
    """Both step times of a workload; only those of rank 0 are whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    home = torch.device("cuda", torch.cuda.current_device())
    workload = workloads.build(name, size="full", device="cpu", seed=seed)
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=1e-4)
    graph = dp.capture(
        workload.model, workload.inputs, workload.loss_fn, optimizer, name=name, device="cuda"
    )
    text = ""
    if rank == 0:
        problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine), exclude=["cpu:0"])
        found = dp.place(problem, placers.Search(), budget=budget, seed=seed)
        text = found.plan.to_json().decode()
    plan = plan_from_json(share(text).encode(), "the plan of rank 0")
    batch = tuple(tensor.to(home) for tensor in workload.inputs)
    with dp.compile(graph, plan, seed=seed, timeout_s=300.0) as step:
        together = time_steps(lambda: step(*batch), [home], SECONDS, STEPS, fixed=True)
        mode, transport = step.executor.mode, step.executor.transport
    dist.barrier()
    alone = None
    if rank == 0:
        one = compile_step(
            *(workload.model, optimizer, graph, plan.placement, plan.order, plan.device_names),
            seed=seed,
        )
        with one:
            gpus = [torch.device("cuda", index) for index in range(size)]
            alone = time_steps(lambda: one(*batch), gpus, SECONDS, STEPS, fixed=True)
    dist.barrier()
    return {
        "workload": name,
        "predicted_ms": plan.predicted.step_ns / 1e6,
        "transfers": plan.predicted.num_transfers,
        "mode": mode,
        "transport": transport,
        "processes": together,
        "one_process": alone,
    }


def main() -> None:
    """Measure, and write what rank 0 has seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--machine", default="", help="by default as many H200 as processes")
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # read once, as NCCL is first used
    dist.init_process_group("cpu:gloo,cuda:nccl")
    machine = dp.load_machine(options.machine or f"h200x{dist.get_world_size()}")
    result: dict[str, Any] = {
        **provenance(),
        **({"commit": os.environ["COMMIT"]} if "COMMIT" in os.environ else {}),
        "gpu": torch.cuda.get_device_name(),
        "processes": dist.get_world_size(),
        "nccl": {key: os.environ[key] for key in NCCL_SETTINGS if key in os.environ},
        "seed": options.seed,
        "budget": options.budget,
        "rows": [],
    }
    for name in options.workloads:
        row = measure(name, machine, options.budget, options.seed)
        if dist.get_rank() == 0:
            result["rows"].append(row)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
