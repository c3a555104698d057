"""What `place` promises around a placer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import random_problem

from devplace.errors import InfeasibleError, InputError, ProblemError
from devplace.placers import Budget, Cpu, Evaluator, Placer, Random, Search, Single, place
from devplace.placers.objective import leanest
from devplace.placers.orders import in_trace_order
from devplace.placers.simple.single import all_on
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_problem, tiny_problems

LAYERS = "x = input bytes=1\n" + "\n".join(
    f"w{k} = parameter bytes=20 module=l.{k}\n"
    f"y{k} = f({f'y{k - 1}' if k else 'x'}, w{k}) bytes=5 ns=9 module=l.{k}\n"
    f"u{k} = sgd(w{k}, y{k}) bytes=20 ns=1 replaces=w{k} module=l.{k}"
    for k in range(4)
)


def advice(error: InfeasibleError) -> dict[str, int]:
    """The limits a message promises to be enough, in bytes by device."""
    texts = re.findall(r"(?:at least|With) ([^()]*) \(bytes\)", str(error))
    assert texts, str(error)
    pairs = (part.rsplit("=", 1) for part in texts[-1].split(", "))
    return {name: int(size) for name, size in pairs}


def test_the_result_is_simulated_again() -> None:
    """Step, peaks, plan and history all come from a simulation of the returned placement."""
    problem = tiny_problems()[1].problem
    result = place(problem, Search(), Budget(evaluations=200), seed=3)
    timeline = simulate(problem, result.placement)
    assert result.step_ns == timeline.makespan_ns == result.plan.predicted.step_ns
    assert result.plan.timeline().makespan_ns == result.step_ns
    assert result.plan.predicted.lower_bound_ns == result.bound.step_ns
    assert result.gap == result.step_ns / result.bound.step_ns - 1
    assert result.evaluations <= 200
    assert (result.placer, result.seed) == ("search", 3)
    assert {"placer": "search", "seed": 3, "limits": {}}.items() <= result.plan.request.items()
    steps = [step for _, _, step in result.history]
    assert steps == sorted(steps, reverse=True)


def test_a_placer_says_why_it_cannot() -> None:
    """A placer that does not support the problem is named with the reason."""
    problem = hand_problem("a = f ns=1", hand_machine({"gpu:0": 9}))
    with pytest.raises(ProblemError, match="Placer cpu cannot place this: no CPU may be used"):
        place(problem, Cpu())


def test_a_placer_that_breaks_a_demand_is_our_bug() -> None:
    """A placement against a pin never leaves `place`."""

    @dataclass(frozen=True)
    class Wrong:
        name: str = "wrong"

        def supports(self, problem: Problem) -> str:
            return ""

        def __call__(
            self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
        ) -> Placement:
            return Placement(np.zeros(len(problem.graph.ops), np.int32))

    problem = hand_problem(
        "a = f ns=1", hand_machine({"gpu:0": 9, "gpu:1": 9}), pins={"a": "gpu:1"}
    )
    with pytest.raises(AssertionError, match="placer wrong broke a demand: 'a' may not go"):
        place(problem, Wrong())


def test_s68_a_limit_that_is_too_small_is_told_to_the_byte() -> None:
    """10 % too little: one sentence has the numbers, and the limit it asks for works."""
    machine = hand_machine({"gpu:0": 1000})
    problem = hand_problem(LAYERS, machine)
    traced = simulate(problem, in_trace_order(problem, all_on(problem, 0)))  # needs the least
    peak = int(traced.peak_bytes[0])
    tight = hand_problem(LAYERS, machine, limits={"gpu:0": peak * 9 // 10})
    with pytest.raises(InfeasibleError, match="found no placement") as caught:
        place(tight, Single(), "9ev")
    needed = advice(caught.value)
    assert needed == {"gpu:0": peak}
    assert caught.value.missing_bytes == {"gpu:0": peak - peak * 9 // 10}
    assert f"{peak} B" in str(caught.value)
    assert "Raise the limits" in str(caught.value)
    assert place(hand_problem(LAYERS, machine, limits=needed), Single(), "9ev").is_feasible


def test_s68_more_memory_is_asked_for_where_a_limit_cannot_help() -> None:
    """Parameters beyond all memory: the memory it asks for is enough."""
    with pytest.raises(InfeasibleError, match="81 B, all usable devices together have 60 B") as e:
        place(hand_problem(LAYERS, hand_machine({"gpu:0": 30, "gpu:1": 30})), Search(), "99ev")
    assert "It would fit with usable memory" in str(e.value)
    assert e.value.missing_bytes == {"all devices": 21}
    larger = hand_machine({"gpu:0": 30, "gpu:1": 30} | advice(e.value))
    assert place(hand_problem(LAYERS, larger), Search(), "99ev").is_feasible


def test_s68_one_op_too_large_is_told_with_what_would_do() -> None:
    """An op that fits nowhere: the memory that is asked for is enough."""
    text = "a = f bytes=50 ns=1 workspace_bytes=70"
    with pytest.raises(InfeasibleError, match="op 'a' alone needs 120 B") as caught:
        place(hand_problem(text, hand_machine({"gpu:0": 100, "gpu:1": 90})), Search(), "9ev")
    assert advice(caught.value) == {"gpu:0": 120}
    assert place(hand_problem(text, hand_machine(advice(caught.value))), Search(), "9ev")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), placer=st.sampled_from([Single(), Search()]))
@pytest.mark.slow
def test_s68_the_advice_works_on_random_problems(seed: int, placer: Placer) -> None:
    """Whoever gives the devices the memory that the message asks for gets a plan."""
    problem = random_problem(seed, 12, 3)
    rich = hand_machine({name: 10**9 for name in problem.machine.device_names})
    problem = Problem(
        problem.graph, rich, problem.costs, limits=dict.fromkeys(rich.device_names, 3000)
    )
    limits = {name: 3000 for name in rich.device_names}
    try:
        place(problem, placer, "200ev")
    except InfeasibleError as error:
        relaxed = Problem(problem.graph, rich, problem.costs, limits=limits | advice(error))
        assert place(relaxed, placer, "200ev").is_feasible


def test_infeasible_plans_are_returned_on_request() -> None:
    """With `allow_infeasible` the best placement comes back with what it lacks."""
    problem = hand_problem(LAYERS, hand_machine({"gpu:0": 30, "gpu:1": 30}))
    result = place(problem, Search(), "99ev", allow_infeasible=True)
    assert not result.is_feasible
    assert result.timeline.missing_bytes


def test_the_request_is_kept_in_the_plan() -> None:
    """Limits, pins and what the caller adds are in the plan, as JSON."""
    problem = hand_problem(
        LAYERS, hand_machine({"gpu:0": 999}), limits={"gpu:0": "1KB"}, pins={"l.0": "gpu:0"}
    )
    plan = place(problem, Single(), "1ev", request={"model": "layers"}).plan
    assert plan.request == {
        "placer": "single",
        "seed": 0,
        "limits": {"gpu:0": "1KB"},
        "pins": {"l.0": "gpu:0"},
        "exclude": [],
        "model": "layers",
    }


def test_a_seed_must_be_a_whole_number_not_below_zero() -> None:
    """A negative seed is refused in one line instead of failing inside numpy."""
    with pytest.raises(InputError, match="seed"):
        place(tiny_problems()[0].problem, Single(), "5ev", seed=-1)


def test_progress_is_told_as_the_budget_is_spent() -> None:
    """Parts rise to 1 and never leave 0 to 1."""
    parts: list[float] = []
    place(tiny_problems()[0].problem, Random(), "30ev", progress=parts.append)
    assert parts == sorted(parts)
    assert 0 < parts[0] <= parts[-1] == 1.0


def test_of_plans_as_fast_the_leanest_is_taken() -> None:
    """Two large tensors are reduced to small ones in 20 ns in any order; one after the other they
    are not there at once. A leaner plan that is slower does not count."""
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=50 ns=5
        b = f(x) bytes=50 ns=5
        c = sum(a) bytes=1 ns=5
        d = sum(b) bytes=1 ns=5
        e = add(c, d) bytes=1 result=output
        """,
        hand_machine({"gpu:0": 200, "gpu:1": 200}),
    )
    devices = np.zeros(6, np.int32)
    together = Placement(devices, np.array([9, 8, 7, 6, 5, 4]))
    in_turn = Placement(devices, np.array([9, 8, 5, 7, 4, 3]))
    first, second = simulate(problem, together), simulate(problem, in_turn)
    assert first.makespan_ns == second.makespan_ns
    assert first.peak_bytes.max() > second.peak_bytes.max()
    split = Placement(np.array([0, 0, 1, 0, 1, 0], np.int32), np.array([9, 8, 7, 6, 5, 4]))
    assert simulate(problem, split).makespan_ns != first.makespan_ns
    assert leanest(together, first, [split, in_turn])[0] is in_turn
    assert leanest(in_turn, second, [split, together])[0] is in_turn
