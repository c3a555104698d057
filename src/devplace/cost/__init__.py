"""How long every op takes on every device."""

from devplace.cost.table import CostModel, CostTable, transfer_ns

__all__ = ["CostModel", "CostTable", "transfer_ns"]
