"""HEFT by a hand-worked example."""

from __future__ import annotations

import numpy as np

from devplace.placers import Budget, Heft, Search, place
from devplace.placers.list_schedulers.heft import IdleTime
from devplace.placers.list_schedulers.list_schedule import upward_rank
from devplace.problem import Problem
from devplace.simulator import simulate
from devplace.testing import brute_force_orders, hand_machine, hand_problem

TWO = {"gpu:0": 100, "gpu:1": 100}
GAP = """
    a = f bytes=1 ns=5
    b = f(a) bytes=1 ns=10
    c = f(b) bytes=1 ns=20
    d = f bytes=1 ns={d}
"""


def device_of(problem: Problem, name: str) -> str:
    """Where HEFT puts an op."""
    result = place(problem, Heft(), Budget(evaluations=10))
    device = result.placement.devices[problem.graph.op_index[name]]
    return problem.machine.device_names[device]


def test_upward_rank_is_that_of_the_paper() -> None:
    """Mean duration plus the largest mean transfer and rank behind it (equation 6)."""
    problem = hand_problem(
        "a = f bytes=8 ns=2,4\nb = f(a) bytes=1 ns=10,30\nc = f(a) bytes=1 ns=1,1",
        hand_machine(TWO, latency_ns=2),
    )
    # a transfer of 8 bytes takes 10 ns on 2 of the 4 pairs of devices: 5 on average
    assert upward_rank(problem, [0, 1]).tolist() == [3 + 5 + 20, 20, 1]


def test_an_op_is_inserted_into_a_gap() -> None:
    """gpu:0 is idle from 5 to 17 (a crosses, b runs, b crosses back): d, last by rank, fits there
    and ends at 13; on gpu:1 the gap before b is too short, behind it d would end at 24."""
    pins = {"a": "gpu:0", "b": "gpu:1", "c": "gpu:0"}
    problem = hand_problem(GAP.format(d=8), hand_machine(TWO), pins=pins)
    assert device_of(problem, "d") == "gpu:0"


def test_an_op_too_long_for_the_gap_goes_behind() -> None:
    """An op of 13 does not fit 5 to 17: behind b on gpu:1 it ends at 29, behind c at 50."""
    pins = {"a": "gpu:0", "b": "gpu:1", "c": "gpu:0"}
    problem = hand_problem(GAP.format(d=13), hand_machine(TWO), pins=pins)
    assert device_of(problem, "d") == "gpu:1"


def test_a_full_device_is_passed_over() -> None:
    """The faster device is not taken when the op's output does not fit there."""
    machine = hand_machine({"gpu:0": 50, "gpu:1": 100})
    problem = hand_problem("a = f bytes=60 ns=1,9", machine)
    assert device_of(problem, "a") == "gpu:1"


def test_a_parameter_goes_to_its_first_reader() -> None:
    """A parameter nobody decided follows the op that reads it; the update stays with it."""
    text = """
        w = parameter bytes=10
        y = f(w) bytes=1 ns=9,1
        w2 = sgd(w, y) bytes=10 ns=5,5 replaces=w
    """
    problem = hand_problem(text, hand_machine(TWO))
    assert [device_of(problem, name) for name in ("w", "y", "w2")] == ["gpu:1"] * 3


def test_idle_time_is_split_by_what_is_taken() -> None:
    """Gaps are found, shortened at both ends, and forgotten when too short for any op."""
    idle = IdleTime(smallest_ns=2)
    assert idle.earliest(0, 5) == 0
    idle.take(10, 5)  # busy 10-15, idle 0-10
    assert idle.earliest(0, 10) == 0
    assert idle.earliest(0, 11) == 15
    assert idle.earliest(4, 6) == 4
    assert idle.earliest(4, 7) == 15
    idle.take(3, 6)  # idle 0-3; 9-10 is too short to be kept
    assert idle.earliest(0, 3) == 0
    assert idle.earliest(1, 2) == 1
    assert idle.earliest(2, 2) == 15
    assert idle.earliest(9, 1) == 15


def test_idle_time_agrees_with_a_plain_search() -> None:
    """On random requests the start is the first one that overlaps nothing taken so far."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        idle, taken = IdleTime(1), []
        for _ in range(30):
            ready, length = int(rng.integers(0, 60)), int(rng.integers(1, 9))
            start = ready
            while any(start < end and begin < start + length for begin, end in taken):
                start += 1
            assert idle.earliest(ready, length) == start
            idle.take(start, length)
            taken.append((start, start + length))


def waiting_problem() -> Problem:
    """By rank a, b, d, c: b starts on gpu:1 when a has crossed, at 20, and d ends at 110. c, which
    could begin at 0, does not fit before b, so it goes behind it and ends at 80."""
    return hand_problem(
        """
        a = f bytes=0 ns=10 module=one
        b = g(a) bytes=0 ns=10 module=two
        c = f bytes=0 ns=50 module=two
        d = g(b) bytes=0 ns=90 module=one
        """,
        hand_machine(TWO),
        pins={"one": "gpu:0", "two": "gpu:1"},
    )


def test_a_device_waits_where_the_schedule_has_it_wait() -> None:
    """Ready ops by any priorities begin c at 0 and end at 150; HEFT's own order ends at 110. The
    plan keeps to it, and so do the search and what is made from the plan."""
    problem = waiting_problem()
    assert brute_force_orders(problem, waits=False).step_ns == 150
    result = place(problem, Heft(), Budget(evaluations=6))
    rows = [[problem.graph.ops[op].name for op in row] for row in result.placement.order or ()]
    assert rows == [["a", "d"], ["b", "c"]]
    assert result.step_ns == result.plan.timeline(problem).makespan_ns == 110
    assert simulate(problem, result.plan.as_placement()).makespan_ns == 110
    assert place(problem, Search(), Budget(evaluations=100)).step_ns == 110
    warm = Search(heuristics=False, start=result.plan.as_placement())
    assert place(problem, warm, Budget(evaluations=20)).step_ns == 110


def test_a_small_budget_goes_to_critical_path_orders_first() -> None:
    """With two evaluations both schedules are tried by critical path, which ends at 150 here."""
    result = place(waiting_problem(), Heft(), Budget(evaluations=2))
    assert (result.step_ns, result.evaluations) == (150, 2)
    assert result.placement.order is None
