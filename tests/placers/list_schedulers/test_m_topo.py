"""m-TOPO by hand-worked examples."""

from __future__ import annotations

from tests.placers.helpers import placed

from devplace.placers import Budget, MTopo, place
from devplace.testing import hand_machine, hand_problem

CHAIN = """
a = f bytes=10 ns=1
b = f(a) bytes=10 ns=1
c = f(b) bytes=10 ns=1
d = f(c) bytes=10 ns=1
"""


def test_a_device_takes_an_equal_share_and_the_largest_op() -> None:
    """Of 40 bytes on two devices each takes 40 / 2 + 10 = 30: three ops, then one."""
    problem = hand_problem(CHAIN, hand_machine({"gpu:0": 100, "gpu:1": 100}))
    found = placed(place(problem, MTopo(coplace=False), Budget(evaluations=1)))
    assert found == {"a": "gpu:0", "b": "gpu:0", "c": "gpu:0", "d": "gpu:1"}


def test_a_smaller_device_takes_no_more_than_it_holds() -> None:
    """With 20 bytes on the first device two ops go there, and two to the next."""
    problem = hand_problem(CHAIN, hand_machine({"gpu:0": 20, "gpu:1": 100}))
    found = placed(place(problem, MTopo(coplace=False), Budget(evaluations=1)))
    assert found == {"a": "gpu:0", "b": "gpu:0", "c": "gpu:1", "d": "gpu:1"}


def test_ops_with_one_reader_are_placed_as_one() -> None:
    """With co-placement the chain is one unit of 40 bytes and stays together."""
    problem = hand_problem(CHAIN, hand_machine({"gpu:0": 100, "gpu:1": 100}))
    assert set(placed(place(problem, MTopo(), Budget(evaluations=1))).values()) == {"gpu:0"}


def test_what_is_left_over_goes_where_most_room_is() -> None:
    """Devices of 10 and 15 bytes: after one op each nothing has room, so c and d go to gpu:1."""
    problem = hand_problem(CHAIN, hand_machine({"gpu:0": 10, "gpu:1": 15}))
    result = place(problem, MTopo(coplace=False), Budget(evaluations=1), allow_infeasible=True)
    assert placed(result)["c"] == "gpu:1"
