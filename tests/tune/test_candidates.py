"""What is worth running, predicted in the order it would run in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from devplace.cost.reuse import CacheTimes, cold_inputs
from devplace.machine import Machine
from devplace.placers import Layers, Single, place
from devplace.problem import Placement, Problem
from devplace.testing import hand_machine
from devplace.tune.candidates import candidates, predicted_ns, singles
from tests.placers.test_orders import problem_of

MIB = 2**20
GPUS = {f"gpu:{k}": 10**12 for k in range(2)}


def with_cache(machine: Machine) -> Problem:
    """Eight micro-batches with tensors of 10 MiB; reading all from memory doubles an op's time. The
    usual times are those of all forward ops first, as critical paths have it."""
    problem = problem_of(8, machine, MIB)
    ops, warm = problem.graph.ops, problem.costs.compute_ns
    forward_first = sorted(range(len(ops)), key=lambda k: (ops[k].name[0] not in "ab", k))
    usual = cold_inputs(problem.graph, forward_first)
    none = CacheTimes({op: frozenset() for op in usual}, warm, 2 * warm)
    times = none.in_order(problem.graph, warm, [forward_first] * len(machine.devices))
    caching = CacheTimes(usual, warm, 2 * warm)
    return replace(problem, costs=replace(problem.costs, compute_ns=times, caching=caching))


def test_a_single_device_runs_in_the_order_that_its_cache_likes() -> None:
    """By hand: in turn, every read but that of the batch finds its tensor in the cache."""
    problem = with_cache(hand_machine({"gpu:0": 10**12}))
    (found,) = singles(problem, {})
    ran = [problem.graph.ops[op].name for op in found.plan.order[0]]
    assert ran == [op.name for op in problem.graph.ops if not op.is_source]
    assert found.is_single
    # each micro-batch takes 21 ns, and 5 more to read x, which 54 MiB of the last one pushed out
    assert found.predicted_ns == 8 * (21 + 5)
    assert found.plan.predicted.step_ns > found.predicted_ns == predicted_ns(problem, found.plan)


def test_micro_batches_in_turn_are_a_candidate_where_predicted_faster() -> None:
    """The plan of a search comes right after the best single device, then the same in turn."""
    problem = with_cache(hand_machine(GPUS))
    ops = problem.graph.ops
    forward = np.array([op.name[0] in "ab" for op in ops])
    devices = np.array([op.name[0] in "abde" and int(op.name[1]) % 2 for op in ops], np.int32)

    class ForwardFirst(Single):
        def __call__(self, *_: Any) -> Placement:
            return Placement(devices, forward.astype(np.int64))

    result = place(problem, ForwardFirst("forward first"), "9ev")
    found = candidates(result)
    assert [candidate.name for candidate in found[1:3]] == [
        "forward first",
        "forward first, in turn",
    ]
    assert found[0].is_single
    assert found[1].plan is result.plan
    assert found[2].predicted_ns < found[1].predicted_ns


@pytest.mark.parametrize("placer", [Single(), Layers()])
def test_without_times_of_a_cache_predictions_are_those_of_the_plan(placer: Any) -> None:
    """Analytic costs are the same in any order."""
    result = place(problem_of(8, hand_machine(GPUS)), placer, "9ev")
    for candidate in candidates(result):
        assert candidate.predicted_ns == candidate.plan.predicted.step_ns
