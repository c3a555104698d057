"""Checks any placer or cost model must pass; for those in this package and for yours.

Example:
    >>> from devplace import placers, testing
    >>> testing.check_placer(placers.Single())
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np

from devplace.cost import CostModel
from devplace.graph import OpGraph
from devplace.machine import Machine
from devplace.placers import Budget, Evaluator, Placer, place
from devplace.placers.margin_retry import with_priority
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.bounds import lower_bound
from devplace.testing.hand import hand_graph, hand_machine
from devplace.testing.tiny import tiny_problems


def check_placer(
    placer: Placer, problems: Iterable[Problem] | None = None, evaluations: int = 60, seed: int = 0
) -> None:
    """Check that a placer keeps what `Placer` promises.

    On every problem it supports: each op has a usable device; colocation, pins and unsupported ops
    are respected; the same seed and evaluations give the same devices and priorities; the problem
    is not changed; no more is simulated than the budget allows; `place` reports the step that a
    simulation of the placement gives (with the priorities of `with_priority` where it has none),
    and it is not below the lower bound.

    Args:
        placer: The placer.
        problems: Problems to place; the tiny ones by default.
        evaluations: Budget per run.
        seed: Seed of its random numbers.

    Raises:
        AssertionError: Says which promise was broken on which problem.
    """
    chosen = [tiny.problem for tiny in tiny_problems()] if problems is None else list(problems)
    for number, problem in enumerate(chosen):
        if not placer.supports(problem):
            _check_one(placer, problem, evaluations, seed, f"{placer.name}, problem {number}")


def _check_one(placer: Placer, problem: Problem, evaluations: int, seed: int, who: str) -> None:
    before = _digest(problem)
    first, spent = _run(placer, problem, evaluations, seed)
    second, _ = _run(placer, problem, evaluations, seed)
    _demand(_digest(problem) == before, f"{who}: the problem was changed")
    _demand(spent <= evaluations, f"{who}: {spent} evaluations of {evaluations} allowed")
    _demand(first == second, f"{who}: the same seed and budget gave another placement")
    _check_placement(problem, first, who)
    result = place(problem, placer, Budget(evaluations=evaluations), seed, allow_infeasible=True)
    alone = simulate(problem, with_priority(problem, first))
    step = alone.makespan_ns
    _demand(result.step_ns == step, f"{who}: reported {result.step_ns} ns, simulated {step} ns")
    is_leaner = result.timeline.peak_bytes.max() < alone.peak_bytes.max()
    _demand(
        is_leaner or bool(np.array_equal(result.placement.devices, first.devices)),
        f"{who}: place() gave other devices than the placer, and no less memory",
    )
    bound = lower_bound(problem).step_ns
    _demand(
        not result.is_feasible or step >= bound,
        f"{who}: step of {step} ns is below the lower bound of {bound} ns",
    )


def _run(placer: Placer, problem: Problem, evaluations: int, seed: int) -> tuple[Placement, int]:
    evaluate = Evaluator(problem, Budget(evaluations=evaluations))
    placement = placer(problem, evaluate, np.random.default_rng(seed))
    return placement, evaluate.meter.num_evaluations


def _check_placement(problem: Problem, placement: Placement, who: str) -> None:
    count = len(problem.graph.ops)
    devices = np.asarray(placement.devices)
    _demand(devices.shape == (count,), f"{who}: {devices.shape} devices for {count} ops")
    usable = set(problem.usable_devices)
    strange = sorted(set(devices.tolist()) - usable)
    _demand(not strange, f"{who}: devices {strange} are not usable")
    if placement.priority is not None:
        shape = np.asarray(placement.priority).shape
        _demand(shape == (count,), f"{who}: {shape} priorities for {count} ops")
    broken = problem.violations(placement)
    _demand(not broken, f"{who}: {broken[:1]}")


def check_cost_model(
    model: CostModel, graph: OpGraph | None = None, machine: Machine | None = None
) -> None:
    """Check that a cost model gives a table that problems can be solved with.

    One int64 time per op and device, none negative; sources and views cost nothing; the same call
    gives the same table; the order of devices does not matter to any device's times.

    Args:
        model: The cost model.
        graph: Graph to price; a small one by default.
        machine: Machine to price it on; two GPUs and a CPU by default.

    Raises:
        AssertionError: Says which promise was broken.
    """
    graph = graph or hand_graph(
        """
        w = parameter bytes=400
        x = input bytes=400
        y = aten.mm.default(x, w) bytes=400 flops=2000 bytes_read=800 bytes_written=400
        v = view(y) bytes=400
        z = aten.relu.default(v) bytes=400 bytes_read=400 bytes_written=400 result=output
        """
    )
    machine = machine or hand_machine({"gpu:0": 10**6, "gpu:1": 10**6, "cpu:0": 10**6})
    who = type(model).__name__
    table = model(graph, machine).compute_ns
    shape = (len(graph.ops), len(machine.devices))
    _demand(table.shape == shape, f"{who}: shape {table.shape}, expected {shape}")
    _demand(table.dtype == np.int64, f"{who}: dtype {table.dtype}, expected int64 nanoseconds")
    _demand(bool((table >= 0).all()), f"{who}: a negative time")
    free = [index for index, op in enumerate(graph.ops) if op.is_source or op.is_view]
    _demand(not table[free].any(), f"{who}: a source or view that takes time")
    again = model(graph, machine).compute_ns
    _demand(bool(np.array_equal(table, again)), f"{who}: another table on the second call")
    turned = replace(machine, devices=machine.devices[::-1])
    other = model(graph, turned).compute_ns[:, ::-1]
    _demand(bool(np.array_equal(table, other)), f"{who}: times depend on the order of devices")


def _digest(problem: Problem) -> str:
    found = hashlib.sha256()
    for part in (problem.core.tasks, problem.core.wires, problem.costs):
        for field in fields(part):
            value = getattr(part, field.name)
            found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    found.update(problem.allowed.tobytes())
    demands = (problem.limits, problem.pins, problem.exclude, problem.graph.ops, problem.machine)
    found.update(repr(demands).encode())
    return found.hexdigest()


def _demand(holds: bool, claim: str) -> None:
    if not holds:
        raise AssertionError(claim)
