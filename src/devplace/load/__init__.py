"""The throughput objective: the smallest largest device load of a pipeline, and block latency."""

from devplace.load.problem import LoadProblem, broken_rule, held_bytes, loads
from devplace.load.solve import LoadSolution, solve, solve_contiguous

__all__ = [
    "LoadProblem",
    "LoadSolution",
    "broken_rule",
    "held_bytes",
    "loads",
    "solve",
    "solve_contiguous",
]
