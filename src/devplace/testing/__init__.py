"""Public conformance checks, problems solved by hand, and brute force to compare with."""

from devplace.testing.brute import BruteForceBest, brute_force, brute_force_orders
from devplace.testing.checks import check_cost_model, check_placer
from devplace.testing.hand import hand_graph, hand_machine, hand_placement, hand_problem, show
from devplace.testing.tiny import TinyProblem, tiny_problems

__all__ = [
    "BruteForceBest",
    "TinyProblem",
    "brute_force",
    "brute_force_orders",
    "check_cost_model",
    "check_placer",
    "hand_graph",
    "hand_machine",
    "hand_placement",
    "hand_problem",
    "show",
    "tiny_problems",
]
