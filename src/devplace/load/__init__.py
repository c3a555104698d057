"""The throughput objective: the smallest largest device load of a pipeline, and block latency."""

from devplace.load.problem import LoadProblem, broken_rule, held_bytes, loads

__all__ = ["LoadProblem", "broken_rule", "held_bytes", "loads"]
