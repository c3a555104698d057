"""Of several processes the first one plans; the others take its plan and its prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from devplace.auto.local_devices import missing_here
from devplace.auto.planning import Target
from devplace.cost.table import CostTable
from devplace.graph import Captured
from devplace.machine import Machine, toml
from devplace.plan.plan import plan_from_json
from devplace.problem import Problem
from devplace.run.ranks.group import Group
from devplace.tune.candidates import Candidate


def share_machine(group: Group, machine: Machine) -> Machine:
    """The machine of the first process, which others may find otherwise."""
    text = group.exchange("machine", toml.dumps(machine), "planning")[0]
    return toml.loads(text, "the machine of rank 0")


def share_fusing(group: Group, target: Target) -> Target:
    """The target, with steps fused as in the first process, which may have a compiler."""
    return replace(target, fuse=group.exchange("fuse", target.fuse, "planning")[0])


def why_unmeasured(group: Group, machine: Machine, exclude: Sequence[str]) -> str:
    """Why one process cannot measure plans for all devices; empty if it can."""
    if len(set(group.hosts)) > 1:
        return f"its processes are on {len(set(group.hosts))} hosts"
    return missing_here(machine, exclude)


def share_candidate(
    group: Group,
    best: Candidate | None,
    target: Target,
    capture: Callable[..., Captured],
) -> Candidate:
    """The candidate of the first process, in all of them.

    Args:
        group: The processes.
        best: What was chosen; None in all but the first.
        target: What is planned for, the same everywhere.
        capture: Number of micro-batches, and further options -> captured step.

    Raises:
        RankError: A process failed, or did not come.
    """
    if best is not None:
        meta = best.problem.graph.meta
        told = {
            "name": best.name,
            "plan": best.plan.to_json().decode(),
            "predicted_ns": best.predicted_ns,
            "prices": _as_lists(best.problem.costs),
            "micro_batches": int(meta.get("micro_batches", 1)),
            "recompute": list(meta.get("recompute", ())),
        }
        group.exchange("plan", told, "planning")
        return best
    found = group.exchange("plan", None, "planning")[0]
    with group.keeping_alive():
        more = {"recompute": found["recompute"]} if found["recompute"] else {}
        graph = capture(found["micro_batches"], **more)
    plan = plan_from_json(found["plan"].encode(), "the plan of rank 0")
    problem = Problem(
        graph,
        target.machine,
        _from_lists(found["prices"]),
        limits=target.limits,
        pins=target.pins,
        exclude=target.exclude,
    )
    return Candidate(found["name"], replace(plan, problem=problem), found["predicted_ns"])


def _as_lists(costs: CostTable) -> dict[str, Any]:
    """Prices as plain JSON; how they change with caches is in the plan's own prediction."""
    return {
        "compute_ns": costs.compute_ns.tolist(),
        "origin": costs.origin,
        "workspace_bytes": _list(costs.workspace_bytes),
        "held_bytes": _list(costs.held_bytes),
        "has_gaps": costs.has_gaps,
        "notes": costs.notes,
    }


def _list(values: Any) -> Any:
    return None if values is None else values.tolist()


def _array(values: Any) -> Any:
    return None if values is None else np.array(values, np.int64)


def _from_lists(told: Mapping[str, Any]) -> CostTable:
    return CostTable(
        _array(told["compute_ns"]),
        told["origin"],
        _array(told["workspace_bytes"]),
        _array(told["held_bytes"]),
        told["has_gaps"],
        tuple(told["notes"]),
    )
