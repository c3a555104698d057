"""Constraint programming: as good as trying everything, and what it proves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.strategies import random_problem, tiny_case

from devplace.errors import InfeasibleError, InputError
from devplace.placers import Budget, Evaluator, Exact, Result, Search, Single, place
from devplace.placers.budget import Meter
from devplace.placers.exact import exact
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.testing import (
    TinyProblem,
    brute_force_orders,
    hand_machine,
    hand_placement,
    hand_problem,
    tiny_problems,
)

pytest.importorskip("ortools")
BUDGET = Budget(evaluations=1000)


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_hand_solved_problems_are_proved_optimal(tiny: TinyProblem) -> None:
    """Each hand-solved optimum is found and proved."""
    result = place(tiny.problem, Exact(), BUDGET)
    assert result.step_ns == tiny.step_ns, tiny.why
    assert (result.status, result.gap) == ("optimal", 0.0)


def idle_problem() -> Problem:
    """The device should wait 10 for `b`, which a long chain follows, and not begin the long `c`."""
    return hand_problem(
        """
        a = f bytes=0 ns=10 module=one
        b = g(a) bytes=0 ns=10 module=two
        c = f bytes=0 ns=50 module=two
        d = g(b) bytes=0 ns=90 module=one
        """,
        hand_machine({"gpu:0": 99, "gpu:1": 99}),
        pins={"one": "gpu:0", "two": "gpu:1"},
    )


def test_a_device_may_wait_while_another_op_is_ready() -> None:
    """No priorities reach 110, because the ready `c` would go first; the order of exact does, and
    its plan keeps it. A search that does not begin with HEFT cannot say so."""
    problem = idle_problem()
    assert brute_force_orders(problem, waits=False).step_ns == 150
    assert place(problem, Search(heuristics=False), BUDGET).step_ns == 150
    result = place(problem, Exact(), BUDGET)
    assert (result.step_ns, result.status) == (110, "optimal")
    assert result.placement.order is not None
    assert simulate(problem, result.placement).makespan_ns == 110
    assert result.plan.timeline(problem).makespan_ns == 110
    assert result.plan.predicted.step_ns == 110
    assert result.history[-1][2] == 110


def _truth(problem: Problem) -> int | None:
    try:
        return brute_force_orders(problem, 1000).step_ns
    except InfeasibleError:
        return None


def test_exact_equals_brute_force_with_orders() -> None:
    """25 random tiny problems on devices with one stream: the best of all placements and orders is
    found, what is proved is true, and almost all is proved."""
    compared = proved = 0
    for seed in range(400):
        problem = tiny_case(seed, 6)
        tasks = problem.core.tasks
        work = int((tasks.is_source == 0).sum())
        if not 3 <= work <= 5 or (problem.core.wires.streams > 1).any():
            continue
        try:
            truth = _truth(problem)
        except InputError:  # too many
            continue
        result = place(problem, Exact(), BUDGET, allow_infeasible=True)
        compared += 1
        if truth is None:
            assert not result.is_feasible, seed
        else:
            assert result.status in ("optimal", "feasible"), seed
            assert result.step_ns == truth, seed
            assert result.bound.step_ns <= truth, seed
        proved += result.status in ("optimal", "infeasible")
        if compared == 25:
            break
    assert compared == 25
    assert proved >= 22


def test_nothing_fits_is_proved() -> None:
    """Three parameters of 60 on two devices of 100, which hold 180 in all: the bound does not see
    it, the model does, and the error says that it is proved; others only say unknown."""
    lines = [f"w{k} = parameter bytes=60" for k in range(3)]
    lines += [f"y{k} = sgd(w{k}) bytes=0 ns=5 replaces=w{k}" for k in range(3)]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 100, "gpu:1": 100}))
    result = place(problem, Exact(), BUDGET, allow_infeasible=True)
    assert (result.status, result.bound.lack) == ("infeasible", "exact")
    with pytest.raises(InfeasibleError, match=r"No placement can fit \(proved by placer exact\)"):
        place(problem, Exact(), BUDGET)
    assert place(problem, Search(), BUDGET, allow_infeasible=True).status == "unknown"
    with pytest.raises(InfeasibleError, match="whether there is one is unknown"):
        place(problem, Search(), BUDGET)


def test_memory_decides_the_order() -> None:
    """Two chains whose large tensors cannot be there at once: one is finished before the other."""
    text = """
        a = f bytes=60 ns=10
        b = f bytes=60 ns=10
        c = g(a) bytes=0 ns=10
        d = g(b) bytes=0 ns=10
    """
    problem = hand_problem(text, hand_machine({"gpu:0": 100}))
    result = place(problem, Exact(), BUDGET)
    assert (result.step_ns, result.status) == (40, "optimal")


def test_transfers_of_one_link_wait_in_the_order_of_requests() -> None:
    """Two tensors of 30 over one link: the reader of both can begin 60 after the first is made."""
    text = """
        a = f bytes=30 ns=5 module=one
        b = f bytes=30 ns=5 module=one
        c = join(a, b) bytes=0 ns=5 module=two
    """
    pins = {"one": "gpu:0", "two": "gpu:1"}
    problem = hand_problem(text, hand_machine({"gpu:0": 99, "gpu:1": 99}), pins=pins)
    result = place(problem, Exact(), BUDGET)
    assert (result.step_ns, result.status) == (70, "optimal")


def test_it_starts_from_a_placement_and_the_budget_is_kept() -> None:
    """The result is never worse than the start, and no more is simulated than allowed."""
    problem = random_problem(5, 20, 3)
    start = place(problem, Search(), Budget(evaluations=500), allow_infeasible=True)
    again = place(
        problem, Exact(start=start.placement), Budget(evaluations=20), allow_infeasible=True
    )
    assert again.evaluations <= 20
    assert sum(again.timeline.missing_bytes.values()) <= sum(start.timeline.missing_bytes.values())


def test_larger_graphs_are_solved_by_classes_and_the_largest_refused() -> None:
    """Beyond `whole` tasks nothing is proved and nothing gets worse; beyond `most` the reason is
    said."""
    problem = random_problem(3, 25, 3)
    budget = Budget(evaluations=300)
    by_class = place(problem, Exact(whole=5), budget, allow_infeasible=True)
    searched = place(problem, Search(), Budget(evaluations=90), allow_infeasible=True)
    if searched.is_feasible:
        assert by_class.is_feasible
        assert by_class.step_ns <= searched.step_ns
    assert by_class.bound.proved_ns == 0
    count = problem.core.tasks.num_tasks
    assert f"the graph has {count} tasks" in Exact(most=10).supports(problem)


def test_without_or_tools_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says what to install."""
    monkeypatch.setattr("devplace.placers.extras.find_spec", lambda name: None)
    reason = Exact().supports(idle_problem())
    assert reason == "needs OR-Tools: pip install 'devplace[exact]'"


def test_an_order_is_part_of_a_placement() -> None:
    """Placements that differ in order only are different, and are simulated in their order."""
    problem = hand_problem("a = f ns=5\nb = f ns=7", hand_machine({"gpu:0": 99}))
    placed = hand_placement(problem, {})
    first, second = (Placement(placed.devices, None, (row,)) for row in ((0, 1), (1, 0)))
    assert first != second
    assert first == replace(first)
    assert simulate(problem, second).start_ns.tolist() == [7, 0]
    assert np.array_equal(simulate(problem, first).start_ns, [0, 5])


def test_times_too_long_for_the_model_prove_nothing() -> None:
    """A step of years is placed by the search alone, which CP-SAT's integers could not add up."""
    rows = "\n".join(f"o{k} = f bytes=1 ns={10**16 + k}" for k in range(70))
    problem = hand_problem(rows, hand_machine({"gpu:0": 10**6, "gpu:1": 10**6, "gpu:2": 10**6}))
    result = place(problem, Exact(), BUDGET)
    assert result.status == "feasible"
    assert result.step_ns == place(problem, Search(), BUDGET).step_ns


def refused(result: Result, reason: str) -> bool:
    """Whether the result says that no model was solved, for this reason, and spent the budget."""
    (note,) = result.notes
    return reason in note and "the search went on instead" in note


@pytest.mark.parametrize("limit", ["size", "time"])
def test_a_model_that_is_too_large_is_not_begun(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would have too many constraints, at all or for the time left, the search gets the
    whole budget; nothing is built."""
    problem = random_problem(3, 25, 3)
    monkeypatch.setattr(exact, "StepModel", lambda *_: pytest.fail("a model was built"))
    if limit == "size":
        monkeypatch.setattr(exact, "MAX_CONSTRAINTS", 10)
    else:
        monkeypatch.setattr(exact, "CONSTRAINTS_PER_S", 1e-9)
    budget = Budget(seconds=10**6, evaluations=400)
    found, again = (place(problem, Exact(), budget, allow_infeasible=True) for _ in range(2))
    assert refused(found, "would have about")
    assert found.plan == again.plan
    assert 300 < found.evaluations <= 400
    part = place(problem, Search(), Budget(evaluations=120), allow_infeasible=True)
    keys = [(sum(r.timeline.missing_bytes.values()), r.step_ns) for r in (found, part)]
    assert keys[0] <= keys[1]


def test_building_a_model_ends_when_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is asked while the model grows; when its time is over, the search goes on."""
    problem = random_problem(3, 25, 3)
    asked: list[bool] = []

    def late() -> bool:
        asked.append(len(asked) >= 5)
        return asked[-1]

    monkeypatch.setattr(exact._Solve, "_deadline", lambda solve, space: late)
    found = place(problem, Exact(), Budget(evaluations=400), allow_infeasible=True)
    assert refused(found, "takes too long to build")
    assert asked == [False] * 5 + [True]
    assert 300 < found.evaluations <= 400


def test_time_for_building_is_a_part_of_what_is_left() -> None:
    """With 100 s left it is late after 60; under a budget of evaluations it never is."""
    problem = random_problem(3, 25, 3)
    for budget, ends in ((Budget(seconds=130.0), True), (Budget(evaluations=10), False)):
        evaluate = Evaluator(problem, budget)
        clock = [30.0]
        evaluate.meter = _HandSet(budget, clock)
        known = place(problem, Single(), allow_infeasible=True).placement
        solve = exact._Solve(Exact(), problem, evaluate, known)
        late = solve._deadline(solve._space(10**6, 0))
        assert not late()
        clock[0] = 89.0
        assert not late()
        clock[0] = 91.0
        assert late() is ends


class _HandSet(Meter):
    """A meter whose clock is set by hand."""

    def __init__(self, budget: Budget, clock: list[float]) -> None:
        super().__init__(budget)
        self._clock = clock

    @property
    def seconds(self) -> float:
        return self._clock[0]
