"""Searches that leave room for gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from devplace.errors import InfeasibleError
from devplace.placers import Search, Single, place
from devplace.problem import Problem
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_problem

MIB = 2**20
# Alone, 100 MiB of parameters and at most 60 of tensors, for which 102 are reserved: 40 MiB do not
# fit into the hole of 30, and the small tensors take a page of 2.
HOLE = f"""
x = input bytes=512
a = f(x) bytes={30 * MIB} ns=1
b = f(a) bytes={20 * MIB} ns=1
c = f(b) bytes={40 * MIB} ns=1
""" + "".join(
    f"w{k} = parameter bytes={20 * MIB} module=l.{k}\n"
    f"y{k} = f(x, w{k}) bytes=512 ns=1 module=l.{k}\n"
    for k in range(5)
)
HOLE += "z = f(b, c, y0, y1, y2, y3, y4) bytes=512 ns=1"


def problem_with(num_gpus: int, limit: int, has_gaps: bool = True) -> Problem:
    """That step on GPUs of `limit` MiB each."""
    machine = hand_machine({f"gpu:{k}": limit * MIB for k in range(num_gpus)}, latency_ns=99)
    problem = hand_problem(HOLE, machine)
    return replace(problem, costs=replace(problem.costs, has_gaps=has_gaps))


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_a_step_that_fits_but_for_gaps_is_spread(num_gpus: int) -> None:
    """What is in use would fit one GPU of 175 MiB, what is reserved does not: parameters move."""
    plain = place(problem_with(num_gpus, 175, has_gaps=False), Search(), "400ev")
    assert len({d for d, order in enumerate(plain.timeline.order) if order}) == 1
    assert plain.notes == ()
    problem = problem_with(num_gpus, 175)
    assert not simulate(problem, plain.placement).is_feasible
    result = place(problem, Search(), "400ev")
    assert result.is_feasible
    assert (result.timeline.peak_bytes <= 175 * MIB).all()
    assert max(result.plan.predicted.peak_bytes.values()) == result.timeline.peak_bytes.max()
    assert result.notes[0].startswith("searched again with room left for gaps between tensors: 4")
    assert result.plan.request["limits"] == {}


def test_rounds_are_counted_and_repeatable() -> None:
    """At most three budgets are spent, and the same seed gives the same plan again."""
    problem = problem_with(2, 175)
    first, second = (place(problem, Search(), "100ev", seed=5) for _ in range(2))
    assert 100 < first.evaluations <= 300
    assert first.evaluations == second.evaluations
    assert first.plan.placement == second.plan.placement
    assert all(0 < count <= first.evaluations for count, _, _ in first.history)


def test_gaps_that_no_placement_avoids_are_told() -> None:
    """On one GPU the message has what is reserved, and with that the step is placed."""
    with pytest.raises(InfeasibleError, match="gpu:0 needs 212 MB, 28") as caught:
        place(problem_with(1, 175), Single(), "9ev")
    assert caught.value.missing_bytes == {"gpu:0": 27 * MIB + 512}
    assert place(problem_with(1, 203), Single(), "9ev").is_feasible


def test_a_step_that_fits_is_searched_once() -> None:
    """With room for the gaps the budget is spent once."""
    result = place(problem_with(2, 300), Search(), "100ev")
    assert result.evaluations <= 100
    assert result.notes == ()
