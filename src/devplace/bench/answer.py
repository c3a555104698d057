"""A solver's answer to an instance, before it is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from devplace.instances import Instance
from devplace.instances.records import (
    DataflowInstance,
    LoadInstance,
    PipelineInstance,
    VariantInstance,
)
from devplace.verify import (
    Stage,
    Verdict,
    verify_latency,
    verify_makespan,
    verify_pipeline,
    verify_throughput,
    verify_variants,
)

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class Split:
    """Device of every node, accelerators first."""

    device: tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """Device of every node, and for accelerators the block it runs in."""

    device: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """Stages of a pipeline, first to last."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class OrderedPlacement:
    """Device of every op, and for each device its ops in order."""

    device: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]


Solution = Split | Blocks | Stages | OrderedPlacement


@dataclass(frozen=True)
class Answer:
    """A solver's answer.

    Attributes:
        solution: What it found, or None.
        status: What it claims.
        bound: No solution is better, in the instance's unit; None if it knows none.
        value: What it says its solution is worth; None if it does not say.
        why: For an infeasible instance the reason.
    """

    solution: Solution | None
    status: Status
    bound: float | None = None
    value: float | None = None
    why: str = ""


def verify(instance: Instance, solution: Solution) -> Verdict:
    """The solution's value and the rules it breaks, computed from the instance's definition."""
    if isinstance(instance, LoadInstance) and isinstance(solution, Split):
        return verify_throughput(instance, solution.device)
    if isinstance(instance, LoadInstance) and isinstance(solution, Blocks):
        return verify_latency(instance, solution.device, solution.block)
    if isinstance(instance, PipelineInstance) and isinstance(solution, Stages):
        return verify_pipeline(instance, solution.stages)
    if isinstance(instance, VariantInstance) and isinstance(solution, Stages):
        return verify_variants(instance, solution.stages)
    if isinstance(instance, DataflowInstance) and isinstance(solution, OrderedPlacement):
        return verify_makespan(instance, solution.device, solution.order)
    raise AssertionError(
        f"a {type(solution).__name__} is no solution of a {type(instance).__name__}"
    )
