"""ETF by hand-worked examples."""

from __future__ import annotations

from tests.placers.helpers import placed

from devplace.placers import Budget, Etf, place
from devplace.testing import hand_machine, hand_problem

TWO = {"gpu:0": 100, "gpu:1": 100}


def test_the_op_that_can_start_first_goes_first() -> None:
    """d can start at once on gpu:1 and does, although b will need that device at 6."""
    problem = hand_problem(
        """
        a = f bytes=1 ns=5
        b = f(a) bytes=1 ns=10
        c = f(b) bytes=1 ns=10
        d = f bytes=1 ns=8
        """,
        hand_machine(TWO),
        pins={"a": "gpu:0", "b": "gpu:1", "c": "gpu:0"},
    )
    assert placed(place(problem, Etf(), Budget(evaluations=10)))["d"] == "gpu:1"


def test_equal_starts_go_by_rank() -> None:
    """Of two ready ops the one with more behind it takes the first device; all fit two devices."""
    problem = hand_problem(
        """
        short = f bytes=1 ns=4
        long = f bytes=1 ns=4
        more = f(long) bytes=1 ns=9
        """,
        hand_machine(TWO, latency_ns=50),
    )
    found = placed(place(problem, Etf(), Budget(evaluations=10)))
    assert found == {"short": "gpu:1", "long": "gpu:0", "more": "gpu:0"}


def test_transfers_wait_for_their_channel() -> None:
    """The second tensor over a shared channel arrives later, so its reader stays at home."""
    problem = hand_problem(
        """
        a = f bytes=9 ns=1
        b = f bytes=9 ns=1
        x = f(a) bytes=1 ns=12
        y = f(b) bytes=1 ns=12
        z = f(b) bytes=1 ns=3
        """,
        hand_machine(TWO, channel="bus"),
        pins={"a": "gpu:0", "b": "gpu:0", "x": "gpu:1", "y": "gpu:0"},
    )
    result = place(problem, Etf(), Budget(evaluations=10))
    # x's input holds the bus until 10; z could start on gpu:0 at 14 or on gpu:1 at 22
    assert placed(result)["z"] == "gpu:0"
    assert result.step_ns == 22


def test_without_room_on_accelerators_the_cpu_helps() -> None:
    """Parameters that do not fit any accelerator go to the device with the most room."""
    problem = hand_problem(
        """
        v = parameter bytes=60
        w = parameter bytes=60
        a = f(v) bytes=0 ns=1,100
        b = f(a, w) bytes=0 ns=1,100
        v2 = sgd(v, b) bytes=0 ns=1,100 replaces=v
        w2 = sgd(w, b) bytes=0 ns=1,100 replaces=w
        """,
        hand_machine({"gpu:0": 100, "cpu:0": 1000}),
    )
    found = placed(place(problem, Etf(), Budget(evaluations=10)))
    assert sorted({found["a"], found["b"]}) == ["cpu:0", "gpu:0"]


def test_a_group_of_thousands_is_no_trouble() -> None:
    """Three thousand ops that belong together are ready at once and end on one device."""
    lines = ["w = parameter", "w2 = sgd(w) ns=1 replaces=w"]
    for k in range(3000):
        lines += [f"s{k}[w] = state", f"u{k} = mul(s{k}[w]) ns=1 replaces=s{k}[w]"]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 10**6, "gpu:1": 10**6}))
    assert problem.core.tasks.num_groups == 1
    assert place(problem, Etf(), Budget(evaluations=10)).step_ns == 3001
