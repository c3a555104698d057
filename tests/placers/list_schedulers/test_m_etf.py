"""m-ETF by hand-worked examples."""

from __future__ import annotations

from tests.placers.helpers import placed

from devplace.placers import Budget, MEtf, place
from devplace.testing import hand_machine, hand_problem

TWO = {"gpu:0": 100, "gpu:1": 100}


def test_ties_go_by_topological_order() -> None:
    """Of two ops that can start at 0 the first in order is placed first, whatever is behind it."""
    problem = hand_problem(
        """
        short = f bytes=1 ns=4
        long = f bytes=1 ns=4
        more = f(long) bytes=1 ns=9
        """,
        hand_machine(TWO, latency_ns=50),
    )
    found = placed(place(problem, MEtf(), Budget(evaluations=10)))
    assert found == {"short": "gpu:0", "long": "gpu:1", "more": "gpu:1"}


def test_a_device_without_room_is_passed_over() -> None:
    """b could start on gpu:0 at 1, before its input is on gpu:1, but does not fit beside a."""
    problem = hand_problem(
        """
        a = f bytes=60 ns=1 result=output
        b = f(a) bytes=60 ns=1 result=output
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 200}),
    )
    result = place(problem, MEtf(coplace=False), Budget(evaluations=10))
    assert placed(result) == {"a": "gpu:0", "b": "gpu:1"}
    assert result.is_feasible


def test_released_memory_is_used_again() -> None:
    """A chain of six ops of 40 bytes fits a device of 100, as outputs go with their reader."""
    lines = ["a0 = f bytes=40 ns=5"] + [f"a{k} = f(a{k - 1}) bytes=40 ns=5" for k in range(1, 6)]
    problem = hand_problem("\n".join(lines), hand_machine(TWO, latency_ns=9))
    result = place(problem, MEtf(coplace=False), Budget(evaluations=10))
    assert set(placed(result).values()) == {"gpu:0"}
    assert result.step_ns == 30


def test_co_placed_ops_do_not_part() -> None:
    """The two readers of a start at once on both devices; what follows one stays with it."""
    problem = hand_problem(
        """
        a = f bytes=1 ns=1
        b = f(a) bytes=1 ns=10
        c = f(a) bytes=1 ns=10
        d = f(b) bytes=1 ns=10
        e = f(c) bytes=1 ns=1
        """,
        hand_machine(TWO),
    )
    found = placed(place(problem, MEtf(), Budget(evaluations=10)))
    assert found["b"] == found["d"] != found["c"] == found["e"]
