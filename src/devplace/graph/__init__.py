"""What is computed: ops, tensors and how they are captured from a model."""

from devplace.graph.captured import Captured, as_captured
from devplace.graph.graph import Member, Op, OpGraph, StepResult, Tensor, require_graph
from devplace.graph.program import Binding, Constant, Program

__all__ = [
    "Binding",
    "Captured",
    "Constant",
    "Member",
    "Op",
    "OpGraph",
    "Program",
    "StepResult",
    "Tensor",
    "as_captured",
    "require_graph",
]
