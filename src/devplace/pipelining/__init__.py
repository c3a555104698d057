"""Pipelines in steady state (smallest largest device load) and the latency of one sample."""

from devplace.pipelining.block_latency import BlockProblem, block_latency, pieces
from devplace.pipelining.effort import SolverEffort
from devplace.pipelining.load_problem import LoadProblem, broken_rule, held_bytes, loads
from devplace.pipelining.replicated import (
    ReplicatedProblem,
    StageSolution,
    evaluate_stages,
    solve_replicated,
)
from devplace.pipelining.solve import LoadSolution, solve, solve_contiguous
from devplace.pipelining.solve_latency import solve_latency
from devplace.pipelining.step_loads import step_loads
from devplace.pipelining.step_solve import (
    StepLoadSolution,
    contiguous_step,
    load_bound,
    place_step,
    together,
)
from devplace.pipelining.tensor_stages import (
    StageVariant,
    TensorStage,
    TensorStageProblem,
    TensorStageSolution,
    evaluate_stage,
    solve_tensor_stages,
)

__all__ = [
    "BlockProblem",
    "LoadProblem",
    "LoadSolution",
    "ReplicatedProblem",
    "SolverEffort",
    "StageSolution",
    "StageVariant",
    "StepLoadSolution",
    "TensorStage",
    "TensorStageProblem",
    "TensorStageSolution",
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
