"""Pipelines in steady state (smallest largest device load) and the latency of one sample."""

from devplace.load.latency import BlockProblem, block_latency, pieces
from devplace.load.problem import LoadProblem, broken_rule, held_bytes, loads
from devplace.load.replicated import (
    ReplicatedProblem,
    StageSolution,
    evaluate_stages,
    solve_replicated,
)
from devplace.load.solve import LoadSolution, solve, solve_contiguous
from devplace.load.solve_latency import solve_latency
from devplace.load.tensor_stages import (
    TensorStage,
    TensorStageProblem,
    TensorStageSolution,
    Variant,
    evaluate_stage,
    solve_tensor_stages,
)

__all__ = [
    "BlockProblem",
    "LoadProblem",
    "LoadSolution",
    "ReplicatedProblem",
    "StageSolution",
    "TensorStage",
    "TensorStageProblem",
    "TensorStageSolution",
    "Variant",
    "block_latency",
    "broken_rule",
    "evaluate_stage",
    "evaluate_stages",
    "held_bytes",
    "loads",
    "pieces",
    "solve",
    "solve_contiguous",
    "solve_latency",
    "solve_replicated",
    "solve_tensor_stages",
]
