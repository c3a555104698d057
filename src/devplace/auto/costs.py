"""What ops cost on the devices a step is planned for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from devplace.cost import CostTable
from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.machine import Machine


def price(graph: OpGraph, machine: Machine) -> CostTable:
    """Costs for planning a step that will run here; what is chosen is measured afterwards."""
    import torch

    costs = Analytic()(graph, machine)
    names = machine.device_names
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [name for name in names if name.startswith("cuda:")]
    if not gpus or not {f"cuda:{k}" for k in range(here)}.issuperset(gpus):
        return costs
    from devplace.run.cuda.memory import held_bytes

    return replace(costs, held_bytes=np.array(held_bytes(names), np.int64))
