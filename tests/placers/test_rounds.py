"""Searches that leave room for gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from devplace.errors import InfeasibleError
from devplace.placers import Exact, Search, Single, place
from devplace.placers.simple.single import all_on
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


def test_a_start_that_fits_is_kept() -> None:
    """A start that fits to the byte, gaps included, is never lost to faster ones that do not."""
    free = problem_with(2, 1000)
    spread = place(problem_with(2, 175), Search(), "400ev").placement
    peaks = simulate(free, spread).peak_bytes.tolist()
    names = free.machine.device_names
    tight = replace(free, limits=dict(zip(names, peaks, strict=True)))
    start = simulate(tight, spread)
    assert start.is_feasible
    for evaluations in (1, 30, 300):
        for placer in (Search(start=spread), Exact(start=spread)):
            result = place(tight, placer, f"{evaluations}ev")
            assert result.is_feasible
            assert result.step_ns <= start.makespan_ns
            assert result.history[-1][2] == result.step_ns


def test_what_was_seen_and_fits_is_returned() -> None:
    """Lowered limits that nothing keeps to do not hide a placement that fits the real ones."""
    problem = problem_with(2, 175)
    single = place(problem_with(1, 175, has_gaps=False), Single(), "9ev").timeline
    need = int(simulate(problem, all_on(problem, 1)).peak_bytes[1])
    assert need > int(single.peak_bytes[0])
    only = replace(problem_with(2, 1000), limits={"gpu:0": need - 1, "gpu:1": need})
    result = place(only, Search(), "1ev", allow_infeasible=True)
    other = place(only, Search(), "40ev")
    assert other.is_feasible
    assert other.step_ns <= simulate(only, all_on(only, 1)).makespan_ns
    assert result.evaluations >= 1
