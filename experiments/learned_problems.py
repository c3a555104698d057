"""Families, machines and problems that the learned placer is trained, chosen and tested on.

A family is a module of `devplace.workloads`. Families of the test, and machines of the cards and
sizes named for it, are never seen in training. (GNMT has kin in NMT, GPT in BERT, Inception in
ResNet; but neither its graphs nor its branches are in training.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from devplace import workloads
from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.placers import Budget, Evaluator
from devplace.placers.rl.grouping_choices import Partings
from devplace.placers.simple.single import all_on
from devplace.problem import Problem
from devplace.simulator import simulate
from devplace.step_capture import capture

# workload, layers (None: its own)
TRAIN = {
    "rnnlm": (("rnnlm", None), ("rnnlm", 4)),
    "nmt": (("nmt-2", None), ("nmt-4", None), ("nmt-8", None)),
    "resnet": (("resnet-50", None),),
    "bert": (("bert-base", None), ("bert-base", 4)),
}
VALIDATION = {"moe": (("moe", None),)}
TEST = {
    "inception": ("inception-v3",),
    "gnmt": ("gnmt-4",),
    "gpt": ("gpt-2",),
}
MACHINES = (
    *("k40x2", "k40x4", "p100x2", "p100x4", "v100x2", "v100x4", "a100x2", "a100x4"),
    *("p100x3", "k40x6", "a100x6", "rtx4090x2", "unequal-2", "laptop", "cpux2", "cpux4"),
)
TEST_MACHINES = ("k40x4", "h100x4", "v100x8")
"""A machine of training, an unseen card, an unseen number of devices."""
MICRO_BATCHES = (1, 2)


@dataclass(frozen=True, eq=False)
class Sample:
    """A problem of training, ready for the policy."""

    label: str
    partings: Partings
    single_ns: int


def capture_small(workload: str, layers: int | None, micro_batches: int) -> Any:
    """Small graph of a training step."""
    config = {} if layers is None else {"layers": layers}
    built = workloads.build(workload, size="small", **config)
    update = torch.optim.SGD(built.model.parameters(), lr=0.01)
    return capture(
        built.model,
        built.inputs,
        built.loss_fn,
        update,
        micro_batches=micro_batches,
        compare_batches=False,  # only planned; a balance loss is no mean over rows
        name=workload,
    )


def capture_all(families: dict[str, Any]) -> list[Any]:
    """Small graphs of some families, one per workload and number of micro-batches."""
    return [
        capture_small(*variant, micro_batches)
        for variants in families.values()
        for variant in variants
        for micro_batches in MICRO_BATCHES
    ]


def draw(graphs: list[Any], rng: np.random.Generator) -> Sample:
    """A random problem: graph, machine, speed of computing, and in two of five cases scarce memory.

    Ops of the small graphs take as long as those of large ones when times are multiplied by up to
    100, while transfers stay as they are.
    """
    graph = graphs[int(rng.integers(len(graphs)))]
    machine = load_machine(MACHINES[int(rng.integers(len(MACHINES)))])
    costs = Analytic()(graph, machine)
    slower = float(np.exp(rng.uniform(np.log(0.5), np.log(100))))
    times = np.rint(costs.compute_ns * slower).astype(np.int64)
    problem = Problem(graph, machine, replace(costs, compute_ns=times))
    fast = [d for d in problem.usable_devices if machine.devices[d].kind != "cpu"]
    alone = simulate(problem, all_on(problem, (fast or list(problem.usable_devices))[0]))
    note = ""
    if len(fast) > 1 and rng.random() < 0.4:
        part = float(rng.uniform(1.3 / len(fast), 1.0))
        most = int(part * alone.peak_bytes.max())
        problem = replace(problem, limits={machine.device_names[d]: most for d in fast})
        note = f" memory {part:.2f}"
    partings = Partings(Evaluator(problem, Budget(evaluations=10**9), threads=1))
    label = f"{graph.name} {machine.name} times {slower:.1f}{note}"
    return Sample(label, partings, alone.makespan_ns)
