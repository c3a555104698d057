"""Brute force."""

from __future__ import annotations

import pytest

from devplace.errors import InfeasibleError, InputError
from devplace.simulator import simulate
from devplace.testing import TinyProblem, brute_force, hand_machine, hand_problem, tiny_problems


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_hand_solved_optima_are_optima(tiny: TinyProblem) -> None:
    """The optimum worked out by hand is what trying every placement finds."""
    best = brute_force(tiny.problem)
    assert best.step_ns == tiny.step_ns, tiny.why
    timeline = simulate(tiny.problem, best.placement)
    assert timeline.makespan_ns == best.step_ns
    assert timeline.is_feasible


def test_nothing_fits_is_said() -> None:
    """Without a feasible placement an InfeasibleError is raised, not a bad placement returned."""
    problem = hand_problem("a = f bytes=20 ns=1", hand_machine({"gpu:0": 10, "gpu:1": 10}))
    with pytest.raises(InfeasibleError, match="None of the 2 placements"):
        brute_force(problem)


def test_too_many_placements_are_refused() -> None:
    """A problem too large to enumerate is refused with both numbers."""
    text = "\n".join(f"o{k} = f ns=1" for k in range(12))
    problem = hand_problem(text, hand_machine({"gpu:0": 99, "gpu:1": 99}))
    with pytest.raises(InputError, match="at most 1000 placements, this problem has 4096"):
        brute_force(problem, most=1000)
