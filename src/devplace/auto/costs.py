"""What ops cost on the devices a step is planned for."""

from __future__ import annotations

from devplace.cost import CostTable
from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.machine import Machine


def price(graph: OpGraph, machine: Machine) -> CostTable:
    """Costs for planning a step that will run here; what is chosen is measured afterwards."""
    return Analytic()(graph, machine)
