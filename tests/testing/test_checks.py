"""The conformance checks find the faults they are there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from devplace.cost import Analytic, CostTable
from devplace.graph import OpGraph
from devplace.machine import Machine
from devplace.placers import Evaluator
from devplace.placers.simple.single import all_on
from devplace.problem import Placement, Problem
from devplace.testing import check_cost_model, check_placer

Rule = Callable[[Problem, Evaluator, np.random.Generator], Placement]


@dataclass(frozen=True)
class Custom:
    """A placer from a function."""

    rule: Rule
    name: str = "custom"

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Whatever the rule says."""
        return self.rule(problem, evaluate, rng)


def first_device(problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> Placement:
    """Everything on the first usable device: a right placer."""
    return all_on(problem, problem.usable_devices[0])


def unseeded(problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> Placement:
    """Other priorities on every call."""
    order = np.random.default_rng().integers(0, 2**40, len(problem.graph.ops))
    return Placement(all_on(problem, problem.usable_devices[0]).devices, order)


def parted(problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> Placement:
    """Ops by index, whatever belongs together."""
    devices = np.arange(len(problem.graph.ops), dtype=np.int32) % len(problem.machine.devices)
    return Placement(problem.spaces.op_devices(devices[problem.core.tasks.task_op]))


def meddling(problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> Placement:
    """Makes the first op faster."""
    problem.costs.compute_ns.setflags(write=True)
    problem.costs.compute_ns[:] += 1
    return first_device(problem, evaluate, rng)


def short(problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> Placement:
    """One device too few."""
    return Placement(first_device(problem, evaluate, rng).devices[:-1])


def cheating(problem: Problem, evaluate: Evaluator, rng: np.random.Generator) -> Placement:
    """Hides what it spent beyond the budget."""
    placement = first_device(problem, evaluate, rng)
    evaluate.meter.num_evaluations += 10_000
    return placement


def test_a_right_placer_passes() -> None:
    """The smallest placer that keeps every promise passes."""
    check_placer(Custom(first_device))


@pytest.mark.parametrize(
    ("rule", "claim"),
    [
        (unseeded, "same seed and budget"),
        (parted, "colocation group|may not go"),
        (meddling, "the problem was changed"),
        (short, "devices for"),
        (cheating, "evaluations of 60 allowed"),
    ],
)
def test_a_broken_promise_is_named(rule: Rule, claim: str) -> None:
    """Each promise has a placer that breaks it, and the check says which."""
    with pytest.raises(AssertionError, match=claim):
        check_placer(Custom(rule))


def test_the_roofline_passes() -> None:
    """The analytic cost model keeps every promise."""
    check_cost_model(Analytic())


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (lambda table: table.astype(np.float64), "dtype"),
        (lambda table: table - 1, "negative"),
        (lambda table: table + 1, "source or view"),
        (lambda table: table[1:], "shape"),
        (lambda table: table * np.arange(1, table.shape[1] + 1), "order of devices"),
    ],
)
def test_a_wrong_cost_table_is_named(
    change: Callable[[np.ndarray], np.ndarray], claim: str
) -> None:
    """Each promise of a cost model has a table that breaks it."""

    def model(graph: OpGraph, machine: Machine) -> CostTable:
        return CostTable(change(Analytic()(graph, machine).compute_ns), "wrong")

    with pytest.raises(AssertionError, match=claim):
        check_cost_model(model)
