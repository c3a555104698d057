"""Moves simulated from where they matter, and native annealing, against whole simulations."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interrupts import ctrl_c
from tests.strategies import problems, random_placement, random_problem

from devplace import placers
from devplace.placers import chains
from devplace.placers.annealing import CoolingSchedule, Moves
from devplace.placers.budget import Budget
from devplace.placers.colocation_groups import mean_duration_ns
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.local_search.classes import BestPlacement, make_classes
from devplace.placers.local_search.explore import Explorer
from devplace.placers.turns import turns_by
from devplace.problem import Placement, Problem
from devplace.simulator.kernel import NativeKernel, native_module
from devplace.testing import hand_machine, hand_problem, tiny_problems
from devplace.testing.layered import layered_problem

native = native_module()
pytestmark = pytest.mark.skipif(native is None, reason="native simulator not built")
LARGEST = np.iinfo(np.int64).max


@settings(max_examples=400, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_moves_give_the_step_time_of_a_whole_simulation(problem: Problem, seed: int) -> None:
    """To the nanosecond, sources and chains of moves included; a cutoff only gives up above it."""
    rng = np.random.default_rng(seed)
    kernel = NativeKernel(native, problem.core)
    device = problem.task_devices(random_placement(problem, rng))
    count, devices = len(device), len(problem.machine.devices)
    if count == 0:
        return
    moves = []
    for _ in range(6):
        tasks = rng.choice(count, int(rng.integers(1, count + 1)), replace=False).astype(np.int32)
        moves.append((tasks, rng.integers(0, devices, len(tasks)).astype(np.int32)))
    cutoff = np.full(len(moves), LARGEST)
    rows = np.stack([device] * len(moves)).copy()
    for row, (tasks, targets) in zip(rows, moves, strict=True):
        row[tasks] = targets
    right = kernel.evaluate(rows, kernel.priority(device), track_memory=False).makespan_ns
    np.testing.assert_array_equal(kernel.moves(device, moves, cutoff)[0], right)
    limits = (right * rng.choice([0.7, 0.99, 1.0, 1.2], len(right))).astype(np.int64)
    found, _ = kernel.moves(device, moves, limits)
    np.testing.assert_array_equal(found, np.where(right <= limits, right, LARGEST))


def explorer_of(
    problem: Problem, chains: int, seed: int, threads: int
) -> tuple[Explorer, BestPlacement]:
    """An explorer with a start."""
    rng = np.random.default_rng(seed)
    evaluate = Evaluator(problem, Budget(evaluations=100_000), threads)
    groups = np.zeros(problem.core.tasks.num_groups, np.int32)
    groups[problem.core.tasks.group] = problem.task_devices(random_placement(problem, rng))
    return Explorer(problem, evaluate, rng, chains), BestPlacement(groups, 0, 0)


@settings(max_examples=120, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_what_chains_report_is_what_a_simulation_gives(problem: Problem, seed: int) -> None:
    """Step time and overflow of their best placement in its order; every demand is kept."""
    if problem.core.tasks.num_groups == 0:
        return
    classes = make_classes(
        problem, np.arange(len(problem.graph.ops), dtype=np.int32), mean_duration_ns(problem)
    )
    explorer, start = explorer_of(problem, 2, seed, 1)
    schedule = CoolingSchedule(0.01, 0.3, 60, 1000, 0.0)
    devices = list(problem.usable_devices)
    check = Evaluator(problem, Budget())
    for best in explorer.run(classes, [start], devices, 1.0, schedule):
        rows = best.groups[problem.core.tasks.group][None, :]
        step, overflow = check.batch(rows, best.priority)
        assert (int(step[0]), int(overflow[0])) == (best.step_ns, best.overflow_bytes)
        groups = np.arange(len(best.groups))
        kept = problem.allowed[groups, best.groups] | (best.groups == start.groups)
        assert kept.all()


def test_chains_are_the_same_on_any_number_of_threads() -> None:
    """Same seed and number of evaluations: same placements."""
    problem = random_problem(3, 60, 4)
    classes = make_classes(
        problem, np.arange(len(problem.graph.ops), dtype=np.int32), mean_duration_ns(problem)
    )
    found = []
    for threads in (1, 3):
        explorer, start = explorer_of(problem, 4, 5, threads)
        schedule = CoolingSchedule(0.01, 0.3, 300, 10_000, 0.0)
        found.append(explorer.run(classes, [start], list(problem.usable_devices), 1.0, schedule))
    for one, other in zip(*found, strict=True):
        assert one.key == other.key
        np.testing.assert_array_equal(one.groups, other.groups)
        np.testing.assert_array_equal(one.priority, other.priority)


def test_chains_keep_to_the_budget_of_evaluations() -> None:
    """No more simulations than the budget leaves."""
    problem = random_problem(4, 40, 3)
    evaluate = Evaluator(problem, Budget(evaluations=200), 1)
    classes = make_classes(
        problem, np.arange(len(problem.graph.ops), dtype=np.int32), mean_duration_ns(problem)
    )
    explorer = Explorer(problem, evaluate, np.random.default_rng(0), 4)
    start = BestPlacement(np.zeros(problem.core.tasks.num_groups, np.int32), 0, 0)
    schedule = CoolingSchedule(0.01, 0.3, 10**9, 10**9, 0.0)
    explorer.run(classes, [start], list(problem.usable_devices), 1.0, schedule)
    assert 190 <= evaluate.meter.num_evaluations <= 200


def test_bad_moves_are_refused_not_read() -> None:
    """Tasks and devices out of range raise instead of crashing."""
    problem = random_problem(0, 10, 2)
    kernel = NativeKernel(native, problem.core)
    device = problem.task_devices(placers.place(problem, placers.Single()).plan.as_placement())
    cutoff = np.full(1, LARGEST)
    for task, target in ((len(device), 0), (-1, 0), (0, 99), (0, -1)):
        move = (np.array([task], np.int32), np.array([target], np.int32))
        with pytest.raises(ValueError, match="range"):
            kernel.moves(device, [move], cutoff)


def test_moves_in_large_graphs_give_the_step_time_of_a_whole_simulation() -> None:
    """Also with more ready tasks than a word of words has bits, and with a task of 300 inputs."""
    lines = [f"o{k} = f ns={1 + k % 7} bytes={k % 50}" for k in range(6000)]
    lines += [f"sum = f({', '.join(f'o{k}' for k in range(0, 6000, 20))}) ns=3"]
    lines += [f"p{k} = f(o{k}) ns={2 + k % 3}" for k in range(6000)]
    machine = hand_machine({f"gpu:{d}": 10**9 for d in range(3)}, latency_ns=4)
    problem = hand_problem("\n".join(lines), machine)
    rng = np.random.default_rng(0)
    kernel = NativeKernel(native, problem.core)
    device = rng.integers(0, 3, problem.core.tasks.num_tasks).astype(np.int32)
    moves = [
        (tasks.astype(np.int32), rng.integers(0, 3, len(tasks)).astype(np.int32))
        for tasks in (rng.choice(len(device), 50, replace=False) for _ in range(20))
    ]
    moves += [(np.array([v], np.int32), np.array([0], np.int32)) for v in range(5900, 12001, 400)]
    rows = np.stack([device] * len(moves)).copy()
    for row, (tasks, targets) in zip(rows, moves, strict=True):
        row[tasks] = targets
    right = kernel.evaluate(rows, kernel.priority(device), track_memory=False).makespan_ns
    found, _ = kernel.moves(device, moves, np.full(len(moves), LARGEST))
    np.testing.assert_array_equal(found, right)


def test_what_is_simulated_again_is_only_the_rest() -> None:
    """A move of the last task of a chain simulates one task, not the whole chain."""
    chain = next(tiny.problem for tiny in tiny_problems() if "chain" in tiny.name)
    kernel = NativeKernel(native, chain.core)
    device = np.zeros(chain.core.tasks.num_tasks, np.int32)
    last = np.array([len(device) - 1], np.int32)
    _, events = kernel.moves(device, [(last, np.array([1], np.int32))], np.full(1, LARGEST))
    assert events < int((chain.core.tasks.is_source == 0).sum())


@settings(max_examples=60, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_native_chains_are_those_of_plain_python(problem: Problem, seed: int) -> None:
    """Same seeds: the same placements, priorities and numbers of simulations."""
    if problem.core.tasks.num_groups == 0:
        return
    classes = make_classes(
        problem, np.arange(len(problem.graph.ops), dtype=np.int32) // 2, mean_duration_ns(problem)
    )
    explorer, start = explorer_of(problem, 2, seed, 1)
    space = explorer._space(classes, list(problem.usable_devices))
    moves = Moves(fresh_share=0.5, order_share=0.4) if seed % 2 else Moves()
    schedule = CoolingSchedule(0.02, 0.4, 50, 1000, 0.0, moves)
    starts, seeds = np.stack([start.groups] * 2), np.array([seed, seed + 1], np.int64)
    given = np.arange(2 * problem.core.tasks.num_tasks, dtype=np.int64).reshape(2, -1)
    keys = np.random.default_rng(seed).integers(0, 9, given.shape)
    turns = np.stack([turns_by(problem, row) for row in keys])
    for priorities, waits in ((None, [0, 0]), (given, [0, 0]), (turns, [1, 0]), (turns, [1, 1])):
        in_turn = np.array(waits, np.uint8)
        arguments = (space, schedule, starts, priorities, in_turn, seeds)
        fast = NativeKernel(native, problem.core).anneal(*arguments, 1)
        slow = chains.anneal(problem.core, *arguments)
        for one, other in zip(fast, slow, strict=True):
            np.testing.assert_array_equal(one, other)
        reached = dataclasses.replace(schedule, least_ns=int(fast[3].min()))
        early = NativeKernel(native, problem.core).anneal(space, reached, *arguments[2:], 1)
        slow = chains.anneal(problem.core, space, reached, *arguments[2:])
        for one, other in zip(early, slow, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_native", [True, False])
def test_a_chain_that_cannot_find_better_ends(is_native: bool) -> None:
    """It ends where its best placement fits and takes as long as any must, with the placement that
    it would have ended with; not where the placement does not fit."""
    tiny = next(tiny for tiny in tiny_problems() if tiny.name == "too large for one")
    problem = tiny.problem
    classes = make_classes(
        problem, np.arange(len(problem.graph.ops), dtype=np.int32), mean_duration_ns(problem)
    )
    explorer, _ = explorer_of(problem, 1, 0, 1)
    space = explorer._space(classes, list(problem.usable_devices))
    start = np.zeros((1, problem.core.tasks.num_groups), np.int32)  # does not fit
    found = []
    for least in (0, tiny.step_ns):
        schedule = CoolingSchedule(0.3, 0.3, 500, 1000, 0.0, least_ns=least)
        arguments = (space, schedule, start, None, np.zeros(1, np.uint8), np.array([3]))
        if is_native:
            found.append(NativeKernel(native, problem.core).anneal(*arguments, 1))
        else:
            found.append(chains.anneal(problem.core, *arguments))
    whole, early = found
    assert (whole[3][0], whole[4][0]) == (tiny.step_ns, 0)
    for one, other in zip(whole[:5], early[:5], strict=True):
        np.testing.assert_array_equal(one, other)
    assert 1 < early[5][0] < whole[5][0] == 500


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_chains_and_keeps_what_they_found(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains without any limit end by it; what they found and made is remembered."""
    problem = layered_problem(300, 3)
    explorer, start = explorer_of(problem, 3, 0, threads)
    evaluate = explorer._evaluate
    evaluate.meter.budget = Budget()
    first = evaluate(Placement(np.zeros(len(problem.graph.ops), np.int32)))
    classes = make_classes(
        problem, np.arange(len(problem.graph.ops), dtype=np.int32), mean_duration_ns(problem)
    )
    endless = CoolingSchedule(0.01, 0.3, 2**62, 2**62, 0.0)
    begun: list[float] = []
    anneal = Evaluator.anneal

    def noted(*args: Any) -> Any:
        begun.append(time.process_time())
        return anneal(*args)

    monkeypatch.setattr(Evaluator, "anneal", noted)
    with ctrl_c(lambda: bool(begun) and time.process_time() > begun[0] + 0.5):
        explorer.run(classes, [start], list(problem.usable_devices), 1.0, endless)
    assert evaluate.meter.num_evaluations > 100
    assert evaluate.history.points[-1][2] < first.step_ns
