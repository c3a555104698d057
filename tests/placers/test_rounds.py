"""Searches that leave room for gaps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.strategies import random_placement

from devplace.errors import InfeasibleError
from devplace.placers import Budget, Evaluator, Exact, Search, Single, place
from devplace.problem import Placement, Problem
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
    with pytest.raises(InfeasibleError, match="gpu:0 needs 202 MiB, 27 MiB") as caught:
        place(problem_with(1, 175), Single(), "9ev")
    assert caught.value.missing_bytes == {"gpu:0": 27 * MIB + 512}
    assert place(problem_with(1, 203), Single(), "9ev").is_feasible


def test_a_step_that_fits_is_searched_once() -> None:
    """With room for the gaps the budget is spent once."""
    result = place(problem_with(2, 300), Search(), "100ev")
    assert result.evaluations <= 100
    assert result.notes == ()


def random_step(seed: int) -> Problem:
    """Twelve ops of random sizes and times on three GPUs."""
    rng = np.random.default_rng(seed)
    lines = []
    for k in range(12):
        reads = ", ".join(f"o{j}" for j in sorted({*rng.integers(0, k, 2).tolist()})) if k else ""
        size, time = int(rng.integers(1, 9 * MIB)), int(rng.integers(1, 99))
        lines.append(f"o{k} = f({reads}) bytes={size} ns={time}")
    machine = hand_machine({f"gpu:{d}": 10**9 for d in range(3)}, bytes_per_ns=10**7)
    problem = hand_problem("\n".join(lines), machine)
    return replace(problem, costs=replace(problem.costs, has_gaps=True))


@pytest.mark.parametrize("seed", range(12))
def test_a_start_that_fits_is_kept(seed: int) -> None:
    """A start that fits to the byte, gaps included, is not lost to faster ones that do not."""
    free = random_step(seed)
    start = random_placement(free, np.random.default_rng(seed))
    known = simulate(free, start)
    limits = dict(zip(free.machine.device_names, known.peak_bytes.tolist(), strict=True))
    tight = replace(free, limits=limits)
    for placer in (Search(start=start), Exact(start=start)):
        result = place(tight, placer, "60ev")
        assert result.step_ns <= known.makespan_ns
        assert result.history[-1][2] == result.step_ns


def test_the_history_ends_with_what_was_found() -> None:
    """Also where what was found fits the limits, but not those lowered by the gaps."""
    text = HOLE.replace("bytes=512 ns=1 module", "bytes=512 ns=100 module")
    text = text.replace("z = f(b, c,", f"p = f(x) bytes={5 * MIB} ns=500\nz = f(b, c, p,")
    machine = hand_machine({"gpu:0": 999 * MIB, "gpu:1": 12 * MIB}, bytes_per_ns=10**6)
    problem = hand_problem(text, machine)
    problem = replace(problem, costs=replace(problem.costs, has_gaps=True))
    whole = simulate(problem, place(problem, Single(), "9ev").placement)
    tight = replace(problem, limits={"gpu:0": int(whole.peak_bytes[0])})
    result = place(tight, Search(), "300ev")
    assert result.evaluations > 300
    assert result.history[-1][2] == result.step_ns


class Recited:
    """Gives one placement after the other, and notes the limits and budget of each search."""

    name = "recited"

    def __init__(self, placements: list[Placement]) -> None:
        self.placements = placements
        self.limits: list[list[int]] = []
        self.budgets: list[Budget] = []

    def supports(self, problem: Problem) -> str:
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        self.limits.append([limit // MIB for limit in problem.limit_bytes])
        self.budgets.append(evaluate.meter.budget)
        return self.placements[len(self.limits) - 1]


def test_each_search_has_less_time_and_more_room_left() -> None:
    """Of 8 s the second and third search have 4 each, of evaluations as many as the first. All on
    gpu:0 leaves gaps of 42 MiB there, which the second search keeps free; c and z on gpu:0 and the
    rest on gpu:1 leave gaps of 2 and 12: the third keeps the largest seen, 42, free on both GPUs.
    CPUs have no gaps."""
    machine = hand_machine({"gpu:0": 175 * MIB, "gpu:1": 155 * MIB, "cpu:0": 50 * MIB})
    problem = hand_problem(HOLE, machine)
    problem = replace(problem, costs=replace(problem.costs, has_gaps=True))
    last = [op.name in ("c", "z") for op in problem.graph.ops]
    together = Placement(np.zeros(len(last), np.int32))
    apart = Placement(np.where(last, 0, 1).astype(np.int32))
    gaps = [(simulate(problem, each).gap_bytes / MIB).round(1) for each in (together, apart)]
    assert [each.tolist() for each in gaps] == [[42.0, 0.0, 0.0], [2.0, 12.0, 0.0]]
    placer = Recited([together, apart, together])
    place(problem, placer, Budget(8.0, 50), allow_infeasible=True)
    assert placer.budgets == [Budget(8.0, 50), Budget(4.0, 50), Budget(4.0, 50)]
    assert placer.limits == [[175, 155, 50], [133, 155, 50], [133, 113, 50]]
