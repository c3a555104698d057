"""Pipelines in steady state (smallest largest device load) and the latency of one sample."""

from devplace.load.effort import Effort
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
from devplace.load.step_loads import step_loads
from devplace.load.step_solve import (
    StepLoadSolution,
    contiguous_step,
    load_bound,
    place_step,
    together,
)
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
    "Effort",
    "LoadProblem",
    "LoadSolution",
    "ReplicatedProblem",
    "StageSolution",
    "StepLoadSolution",
    "TensorStage",
    "TensorStageProblem",
    "TensorStageSolution",
    "Variant",
    "block_latency",
    "broken_rule",
    "contiguous_step",
    "evaluate_stage",
    "evaluate_stages",
    "held_bytes",
    "load_bound",
    "loads",
    "pieces",
    "place_step",
    "solve",
    "solve_contiguous",
    "solve_latency",
    "solve_replicated",
    "solve_tensor_stages",
    "step_loads",
    "together",
]
