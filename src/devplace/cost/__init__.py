"""How long every op takes on every device."""

from devplace.cost.analytic import Analytic
from devplace.cost.table import CostModel, CostTable

__all__ = ["Analytic", "CostModel", "CostTable"]
