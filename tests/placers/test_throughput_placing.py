"""Placing for a full pipeline of steps."""

from __future__ import annotations

import itertools

import pytest
from tests.pipelining.tiny import native
from tests.strategies import random_problem

from devplace.errors import InfeasibleError, InputError, ProblemError
from devplace.pipelining import step_loads, step_solve
from devplace.placers import (
    Budget,
    Contiguous,
    Heft,
    PipeDream,
    Search,
    Single,
    place,
    throughput_placing,
)
from devplace.plan import load_plan
from devplace.problem import Problem
from devplace.testing import hand_machine, hand_problem, tiny_problems
from devplace.verify import verify_plan, verify_throughput_plan

STEP = """
x = input bytes=10
w = parameter bytes=40
v = parameter bytes=40
a = f(x, w) bytes=20 ns=50 module=one
b = f(a, v) bytes=10 ns=60 module=two
loss = f(b) bytes=1 ns=10 result=loss
gb = g(loss, b, v) bytes=20 ns=70 module=two stage=backward
dv = g(b, a) bytes=40 ns=30 module=two stage=backward
ga = g(gb, a) bytes=40 ns=60 module=one stage=backward
w2 = u(w, ga) bytes=40 ns=5 stage=update replaces=w
v2 = u(v, dv) bytes=40 ns=5 stage=update replaces=v
"""


def problem(**memory: int) -> Problem:
    """A training step of two layers on two equal GPUs."""
    room = {"gpu:0": 10_000, "gpu:1": 10_000, **memory}
    return hand_problem(STEP, hand_machine(room, bytes_per_ns=1))


@pytest.mark.parametrize(
    "placer", [Search(), Contiguous(), PipeDream(), Single(), Heft()], ids=lambda p: p.name
)
def test_value_is_what_the_verifier_finds(placer, tmp_path):
    """Of any placer: the largest load, the plan that holds it, and its step alone."""
    found = place(problem(), placer, "300ev", objective="throughput")
    loads = tuple(step_loads(problem(), found.timeline.task_devices).tolist())
    verdict = verify_throughput_plan(problem(), found.plan)
    assert not verdict.broken
    assert loads == verdict.loads_ns
    assert found.value_ns == max(loads) >= found.bound_ns
    assert found.step_ns == found.plan.predicted.step_ns
    assert not verify_plan(problem(), found.plan).broken
    path = tmp_path / "plan.json"
    found.plan.save(path)
    loaded = load_plan(path)
    loaded.check(problem())
    assert loaded.request["objective"] == "throughput"
    assert loaded.predicted.max_load_ns == found.value_ns


def test_search_is_the_best_and_says_so():
    """On a small step the value is proved, and no other placer is below it."""
    found = place(problem(), Search(), "300ev", objective="throughput")
    assert found.status == "optimal"
    assert found.gap == 0.0
    for placer in (Contiguous(), PipeDream(), Single(), Heft()):
        other = place(problem(), placer, "300ev", objective="throughput")
        assert other.value_ns >= found.value_ns


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_memory_limits_hold(tiny):
    """What is returned fits when the step runs alone."""
    found = place(tiny.problem, Search(), "300ev", objective="throughput")
    assert found.is_feasible
    assert not verify_plan(tiny.problem, found.plan).broken
    assert not verify_throughput_plan(tiny.problem, found.plan).broken


def test_too_little_memory_is_an_error():
    """With the same words as for latency."""
    with pytest.raises(InfeasibleError, match="lower the batch size"):
        place(problem(**{"gpu:0": 100, "gpu:1": 100}), Search(), "50ev", objective="throughput")


def test_search_starts_from_a_given_placement():
    """The result is never worse than the start."""
    first = place(problem(), PipeDream(), "10ev", objective="throughput")
    start = Search(start=first.plan.as_placement())
    again = place(problem(), start, "20ev", objective="throughput")
    assert again.value_ns <= first.value_ns


def test_unknown_objective():
    """Says which there are."""
    with pytest.raises(InputError, match="Known: latency, throughput"):
        place(problem(), Search(), "10ev", objective="thruput")


def test_a_source_that_nothing_reads_binds_no_memory():
    """Of a value that is replaced unread nothing is held, so the bound counts none of it."""
    machine = hand_machine({"gpu:0": 100, "cpu:0": 100}, unsupported={"cpu:0": ("f",)})
    step = "v = buffer bytes=90\nu = buffer bytes=90\na = f bytes=10 ns=5 replaces=v\n"
    step += "b = f bytes=10 ns=5 replaces=u"
    found = place(hand_problem(step, machine), Single(), "9ev", objective="throughput")
    assert found.is_feasible
    assert (found.value_ns, found.bound_ns, found.status) == (10, 10, "optimal")


@pytest.mark.parametrize("size", ["ns=300000000000000000", "bytes=500000000000000000"])
def test_sums_that_are_too_large_are_told(size):
    """Times or sizes that a pipeline's model cannot add up are an error that says how large."""
    machine = hand_machine({"gpu:0": 2**62, "gpu:1": 2**62})
    large = hand_problem(f"a = f {size}\nb = f {size}\nc = f(a, b) bytes=1 ns=1", machine)
    assert place(large, Search(), "9ev").is_feasible
    for placer in (Search(), Heft(), Contiguous()):
        with pytest.raises(ProblemError, match=r"add up to|in all, these have 1e"):
            place(large, placer, "9ev", objective="throughput")


def test_seconds_count_the_starts(monkeypatch):
    """The time that making the starts takes is part of what is reported, and ends their making."""
    made = []

    class Handed(throughput_placing.Meter):
        """Its clock goes on by 0.2 s with each start, and not otherwise."""

        seconds = property(lambda self: 0.2 * len(made))

    class Slow(PipeDream):
        def __call__(self, problem, evaluate, rng):
            made.append(self)
            return super().__call__(problem, evaluate, rng)

    monkeypatch.setattr(throughput_placing, "Meter", Handed)
    monkeypatch.setattr(throughput_placing, "_STARTS", (Slow(), Slow(), Slow()))
    found = place(problem(), Search(), "0.4s", objective="throughput")
    assert len(made) == 1
    assert found.seconds == 0.2
    made.clear()
    place(problem(), Search(), "50ev", objective="throughput")
    assert len(made) == 3


def test_a_search_out_of_time_claims_no_bound_it_did_not_reach(monkeypatch):
    """Where time ends before all placements were tried, the best so far is not called optimal."""
    clock = itertools.count()
    monkeypatch.setattr(step_solve.time, "monotonic", lambda: next(clock) / 10)
    machine = hand_machine({"gpu:0": 10_000, "gpu:1": 10_000}, bytes_per_ns=1000)
    effort = step_solve.SolverEffort(seconds=0.05, evaluations=None, seed=0, threads=1)
    found = step_solve.place_step(hand_problem(STEP, machine), effort)
    assert found.over_bytes == 0
    assert found.how == "one device"
    assert 0 < found.bound_ns < found.value_ns


@pytest.mark.parametrize("evaluations", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("tries_all", [True, False])
@pytest.mark.parametrize("is_native", [True, False])
def test_no_more_is_tried_than_the_budget_allows(evaluations, tries_all, is_native, monkeypatch):
    """Placements simulated by the starts and by the solver, and moves, are counted together, also
    beside a limit of time."""
    if not tries_all:
        monkeypatch.setattr(step_solve, "_MAX_TRIED", 0.5)
    simulated = []
    real = step_solve.simulate
    monkeypatch.setattr(step_solve, "simulate", lambda *of: simulated.append(of) or real(*of))
    problems = [problem(), *(random_problem(seed, 20, 3) for seed in range(4))]
    for each in problems:
        for budget in (Budget(evaluations=evaluations), Budget(20.0, evaluations)):
            simulated.clear()
            with native(is_native):
                found = place(each, Search(), budget, objective="throughput", allow_infeasible=True)
            assert len(simulated) <= found.evaluations <= evaluations


def test_a_start_is_tried_first():
    """With one evaluation the result is the start: it is never worse, however small the budget."""
    first = place(problem(), Search(), "300ev", objective="throughput")
    start = Search(start=first.plan.as_placement())
    again = place(problem(), start, "1ev", objective="throughput")
    assert (again.evaluations, again.value_ns) == (1, first.value_ns)


def test_without_evaluations_for_all_placements_nothing_is_proved():
    """Where the budget ends before a placement that fits is tried, the best so far is not called
    optimal."""
    machine = hand_machine({"gpu:0": 10_000, "gpu:1": 10_000}, bytes_per_ns=1000)
    effort = step_solve.SolverEffort(seconds=None, evaluations=1)
    found = step_solve.place_step(hand_problem(STEP, machine), effort)
    assert (found.evaluations, found.how) == (1, "one device")
    assert found.bound_ns < found.value_ns
    enough = step_solve.SolverEffort(seconds=None, evaluations=300)
    best = step_solve.place_step(hand_problem(STEP, machine), enough)
    assert best.bound_ns == best.value_ns < found.value_ns


def test_a_limit_of_time_holds_beside_one_of_evaluations(monkeypatch):
    """Models are solved within the seconds that are left, however many moves there are; without
    seconds the clock plays no part."""
    given = []
    real = step_solve.solve

    def spy(model, seconds, *rest, max_evaluations, **more):
        given.append(seconds)
        return real(model, seconds, *rest, max_evaluations=min(5, max_evaluations), **more)

    monkeypatch.setattr(step_solve, "solve", spy)
    monkeypatch.setattr(step_solve, "_MAX_TRIED", 0.5)
    monkeypatch.setattr(step_solve._Run, "_settled", lambda run: len(given) > 2)
    for budget in (Budget(7.0, 10**9), Budget(evaluations=10**9)):
        given.clear()
        place(problem(), Search(), budget, objective="throughput")
        assert given
        assert all(0 < s <= 7.0 for s in given) if budget.seconds else set(given) == {None}
