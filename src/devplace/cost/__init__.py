"""How long every op takes on every device."""

from devplace.cost.analytic import Analytic
from devplace.cost.table import CostModel, CostTable, transfer_ns

__all__ = ["Analytic", "CostModel", "CostTable", "transfer_ns"]
