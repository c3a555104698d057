"""Predicted training steps on one card: the sum of the analytic costs of all ops.

Writes docs/results/analytic_costs.json; the measured steps they are held against, and where those
come from, are in docs/concepts/costs.md. Run: `python experiments/analytic_costs.py`.
"""

from __future__ import annotations

import torch
from common import provenance, write

from devplace import workloads
from devplace.cost.analytic import Analytic
from devplace.machine import load_machine
from devplace.step_capture import capture

STEPS = (
    ("resnet-50", "h200x1", {}),
    ("inception-v3", "h200x1", {}),
    ("bert-large", "h200x1", {"batch": 32, "layers": 12}),
    ("rnnlm", "h200x1", {}),
    ("nmt-4", "h200x1", {}),
    ("gnmt-4", "h200x1", {}),
    ("resnet-50", "p100x1", {}),
    ("inception-v3", "p100x1", {}),
)


def predicted_ns(name: str, machine_name: str, options: dict[str, int]) -> int:
    """Sum of the costs of a plain SGD step on the machine's first GPU."""
    workload = workloads.build(name, device="meta", **options)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
    graph = capture(workload.model, workload.inputs, workload.loss_fn, optimizer, name=name)
    machine = load_machine(machine_name)
    costs = Analytic()(graph, machine)
    return int(costs.compute_ns[:, machine.device_index["cuda:0"]].sum())


def main() -> None:
    """Price every step and write the result."""
    rows = [
        {
            "workload": name,
            "machine": machine,
            **options,
            "predicted_ns": predicted_ns(name, machine, options),
        }
        for name, machine, options in STEPS
    ]
    write("analytic_costs", {"provenance": provenance(), "rows": rows})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
