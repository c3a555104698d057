"""Steps placed for a full pipeline."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipelining.tiny import native
from tests.strategies import problems, random_problem

from devplace.pipelining import (
    SolverEffort,
    contiguous_step,
    load_bound,
    place_step,
    step_loads,
    step_solve,
)
from devplace.pipelining.pairwise import PairShares
from devplace.pipelining.step_classes import step_classes
from devplace.pipelining.step_problem import PS_PER_NS, StepProblem
from devplace.problem import Placement
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_problem
from devplace.verify import verify_loads

FEW = SolverEffort(seconds=None, evaluations=300)

CHAIN = """
x = input bytes=10
a = f(x) bytes=10 ns=50
b = f(a) bytes=20 ns=40
c = f(b) bytes=10 ns=60 result=output
"""


def placements(step: StepProblem):
    """Every placement of classes that is allowed."""
    options = [np.flatnonzero(row).tolist() for row in step.allowed]
    for choice in itertools.product(*options):
        yield np.array(choice, np.int32)


def best_load(step: StepProblem) -> int | None:
    """The smallest largest load within memory, by trying every placement."""
    values = []
    for classes in placements(step):
        device = classes[step.of_task]
        placement = Placement(step.problem.spaces.op_devices(device))
        if simulate(step.problem, placement).is_feasible:
            values.append(int(step.prices.loads_ns(device).max()))
    return min(values, default=None)


@settings(max_examples=200, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_loads_equal_the_verifier(problem, seed):
    """Loads of any placement of classes are those that the definition gives."""
    step = StepProblem(problem)
    rng = np.random.default_rng(seed)
    choice = [int(rng.choice(np.flatnonzero(row))) for row in step.allowed]
    device = np.array(choice, np.int32)[step.of_task]
    verdict = verify_loads(problem, problem.spaces.op_devices(device).tolist())
    assert not verdict.broken
    assert step_loads(problem, device).tolist() == list(verdict.loads_ns)


SMALL = st.builds(
    random_problem,
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(1, 9),
    num_devices=st.integers(1, 3),
)


@settings(max_examples=60, deadline=None)
@given(problem=SMALL)
def test_small_problems_are_solved(problem):
    """Whatever devices, links, memory and streams, the value is that of trying everything, and
    known to be the best."""
    step = StepProblem(problem)
    if step.allowed.sum(axis=1).astype(float).prod() > 500:
        return
    best, found = best_load(step), place_step(problem, FEW)
    assert (best is None) == (found.over_bytes > 0)
    if best is not None:
        assert found.value_ns == found.bound_ns == best


@pytest.mark.parametrize("is_native", [True, False])
def test_search_and_bound_on_both_sides_of_the_best(is_native, monkeypatch):
    """The search proper, native or in Python, is never below the best, mostly at it, and its bound
    is never above it."""
    monkeypatch.setattr(step_solve, "_MAX_TRIED", 0.5)
    reached = []
    for seed in range(30):
        problem = random_problem(seed, 2 + seed % 7, 1 + seed % 3)
        step = StepProblem(problem)
        best = best_load(step)
        with native(is_native):
            found = place_step(problem, SolverEffort(seconds=None, evaluations=1000))
        if best is None:
            assert found.over_bytes > 0
            continue
        assert found.bound_ns <= best
        if found.over_bytes == 0:
            assert found.value_ns >= best
        reached.append(found.over_bytes == 0 and found.value_ns == best)
    assert sum(reached) >= 0.8 * len(reached)


@settings(max_examples=100, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_moves_keep_loads_up_to_date(problem, seed):
    """Loads and bytes after moves of classes are those of a fresh count."""
    step = StepProblem(problem)
    rng = np.random.default_rng(seed)
    sizes = list(range(len(step.first)))
    device = np.array([int(rng.choice(np.flatnonzero(row))) for row in step.allowed], np.int32)
    shares = PairShares(step, device, sizes)
    for _ in range(10 * bool(len(device))):
        i = int(rng.integers(len(device)))
        shares.move(i, int(rng.choice(np.flatnonzero(step.allowed[i]))))
    fresh = PairShares(step, np.array(shares.device, np.int32), sizes)
    assert shares.load == fresh.load
    assert shares.held == fresh.held
    exact = step.prices.loads_ns(np.array(shares.device, np.int32)[step.of_task])
    streams = step.problem.core.wires.streams
    if (streams == 1).all() and len(step.prices.transfer_ns) == 1:
        assert [load // PS_PER_NS for load in shares.load] == exact.tolist()


def test_by_hand():
    """A chain on two equal GPUs is cut where the larger load is smallest: 50 + 40 + 20 and
    20 + 60 beats 50 + 10 and 10 + 40 + 60."""
    problem = hand_problem(CHAIN, hand_machine({"gpu:0": 1000, "gpu:1": 1000}, bytes_per_ns=1))
    found = place_step(problem, FEW)
    assert sorted(found.loads_ns.tolist()) == [80, 110]
    assert found.over_bytes == 0
    device = np.array([0, 1, 1], np.int32)
    assert step_loads(problem, device).tolist() == [60, 110]


def test_memory_is_kept():
    """A placement that does not fit is not taken while another one does."""
    machine = hand_machine({"gpu:0": 60, "gpu:1": 60}, bytes_per_ns=1)
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=50 ns=50
        b = f(a) bytes=50 ns=1
        c = f(a, b) bytes=1 ns=1 result=output
        """,
        machine,
    )
    assert place_step(problem, FEW).over_bytes > 0
    roomy = hand_machine({"gpu:0": 160, "gpu:1": 60}, bytes_per_ns=1)
    wide = type(problem)(problem.graph, roomy, problem.costs)
    assert place_step(wide, FEW).over_bytes == 0


def test_same_seed_same_placement():
    """Counted moves, and not the clock, decide."""
    machine = hand_machine({"gpu:0": 1000, "gpu:1": 1000, "gpu:2": 1000}, bytes_per_ns=1)
    problem = hand_problem(CHAIN, machine)
    first, second = place_step(problem, FEW), place_step(problem, FEW)
    assert first.device.tolist() == second.device.tolist()


def test_pins_hold():
    """A pinned op stays where the user wants it."""
    machine = hand_machine({"gpu:0": 1000, "gpu:1": 1000}, bytes_per_ns=1)
    problem = hand_problem(CHAIN, machine)
    for name in ("gpu:0", "gpu:1"):
        pinned = type(problem)(
            problem.graph, machine, problem.costs, pins={"c": name, "b": "gpu:0"}
        )
        found = place_step(pinned, FEW)
        assert not pinned.violations(Placement(pinned.spaces.op_devices(found.device)))


def test_contiguous_goes_forward():
    """On a chain the contiguous split is the best one."""
    machine = hand_machine({"gpu:0": 1000, "gpu:1": 1000}, bytes_per_ns=1)
    problem = hand_problem(CHAIN, machine)
    device = contiguous_step(problem, 5.0)
    assert device is not None
    assert int(step_loads(problem, device).max()) == 110
    assert load_bound(problem) <= 110


def test_backward_ops_sit_with_their_forward_ops():
    """A backward op goes with the forward op of its call whose output or input it reads."""
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=1 ns=5 module=m
        b = f(a) bytes=1 ns=5 module=m
        loss = f(b) bytes=1 ns=5 result=loss
        gb = g(loss, b) bytes=1 ns=5 module=m stage=backward
        ga = g(gb, a) bytes=1 ns=5 module=m stage=backward result=output
        """,
        hand_machine({"gpu:0": 1000, "gpu:1": 1000}),
    )
    names = [problem.graph.ops[v].name for v in problem.core.tasks.task_op]
    of = dict(zip(names, step_classes(problem).tolist(), strict=True))
    assert of["gb"] == of["b"]
    assert of["a"] != of["b"]
    assert of["ga"] in (of["a"], of["b"])


def test_many_classes_are_counted_without_overflow():
    """A chain of 2,000 ops has more placements than a float can hold."""
    lines = ["x = input bytes=1", "a0 = f(x) bytes=1 ns=1"]
    lines += [f"a{k} = f(a{k - 1}) bytes=1 ns=1" for k in range(1, 2000)]
    text = "\n".join([*lines[:-1], lines[-1] + " result=output"])
    machine = hand_machine({"gpu:0": 10**6, "gpu:1": 10**6}, bytes_per_ns=1)
    found = place_step(hand_problem(text, machine), SolverEffort(seconds=None, evaluations=50))
    assert found.bound_ns <= found.value_ns <= 2000
