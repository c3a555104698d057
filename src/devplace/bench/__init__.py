"""Published instances solved, checked, and compared with the best values known."""

from devplace.bench.best_known import BestKnown, load_best_known, save_best_known
from devplace.bench.run import BenchRow, bench, solve
from devplace.bench.solvers import Effort

__all__ = [
    "BenchRow",
    "BestKnown",
    "Effort",
    "bench",
    "load_best_known",
    "save_best_known",
    "solve",
]
