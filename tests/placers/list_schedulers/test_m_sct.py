"""m-SCT: the linear program and the schedule that favours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placers.helpers import placed

from devplace.placers import Budget, MEtf, MSct, place
from devplace.placers.list_schedulers.favourites import TaskDag, favourite_children, solve
from devplace.testing import hand_machine, hand_problem

pytest.importorskip("highspy", reason="needs the extra lp")

TWO = {"gpu:0": 1000, "gpu:1": 1000}


def dag(times: list[float], edges: list[tuple[int, int, float]]) -> TaskDag:
    src, dst, cost = (np.array(column) for column in zip(*edges, strict=True))
    return TaskDag(np.array(times), src, dst, cost.astype(float))


def test_the_longer_branch_is_the_favourite() -> None:
    """0 feeds 1 (then 9 ns of work) and 2 (1 ns) at a cost of 4: only one may follow at once, and
    the step is shortest, 10, when that is 1; 2 may wait for its input."""
    graph = dag([1, 9, 1, 0], [(0, 1, 4), (0, 2, 4), (1, 3, 0), (2, 3, 0)])
    x = solve(graph)
    assert x[0] == pytest.approx(0)
    assert x[1] == pytest.approx(1)
    assert favourite_children(graph, 0.1, 2000).tolist()[0] == 1


def test_a_task_is_the_favourite_of_at_most_one() -> None:
    """0 and 1 both feed 2 only; the sum over its makers allows one favourite."""
    graph = dag([5, 1, 1], [(0, 2, 3), (1, 2, 3)])
    found = favourite_children(graph, 0.1, 2000).tolist()
    assert found == [2, -1, -1]


def test_chains_follow_themselves() -> None:
    """In a chain each task is the favourite of the one before, without any linear program."""
    graph = dag([1, 1, 1], [(0, 1, 5), (1, 2, 5)])
    assert favourite_children(graph, 0.1, 1).tolist() == [1, 2, -1]


def test_a_chain_is_joined_at_its_ends() -> None:
    """The chain 0-1 forks into 2 and 3: its last task has the favourite, the longer 3."""
    graph = dag([1, 1, 1, 9, 1], [(0, 1, 5), (1, 2, 5), (1, 3, 5), (2, 4, 0), (3, 4, 0)])
    assert favourite_children(graph, 0.1, 2000).tolist()[:2] == [1, 3]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 30), most=st.sampled_from([5, 2000]))
def test_favourites_are_edges_and_one_to_one(seed: int, count: int, most: int) -> None:
    """Every favourite child is a reader, nobody has two, and nobody is it twice."""
    rng = np.random.default_rng(seed)
    pairs = sorted({tuple(sorted(p)) for p in rng.integers(0, count, (2 * count, 2)).tolist()})
    edges = [(i, j, int(rng.integers(0, 9))) for i, j in pairs if i != j]
    if not edges:
        return
    graph = dag(rng.integers(0, 9, count).astype(float).tolist(), edges)
    found = favourite_children(graph, 0.1, most)
    favoured = [(i, j) for i, j in enumerate(found.tolist()) if j >= 0]
    assert set(favoured) <= {(i, j) for i, j, _ in edges}
    assert len({j for _, j in favoured}) == len(favoured)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_linear_program_keeps_its_demands(seed: int) -> None:
    """x is between 0 and 1, and its sums leave at most one favourite to readers and makers."""
    rng = np.random.default_rng(seed)
    pairs = sorted({tuple(sorted(p)) for p in rng.integers(0, 12, (25, 2)).tolist()})
    edges = [(i, j, int(rng.integers(1, 9))) for i, j in pairs if i != j]
    graph = dag(rng.integers(1, 9, 12).astype(float).tolist(), edges)
    x = solve(graph)
    assert (x >= -1e-6).all()
    assert (x <= 1 + 1e-6).all()
    for ends in (graph.src, graph.dst):
        degree = np.bincount(ends, minlength=12)
        assert (np.bincount(ends, x, 12) >= degree - 1 - 1e-6).all()


def test_the_favourite_child_follows_its_maker() -> None:
    """Both y and f could follow a on gpu:0 at 4. m-ETF takes y, so f has to fetch 8 bytes until 12
    and g ends at 72; the favourite of a is f, as 60 ns of work hang on it, and g ends at 64."""
    problem = hand_problem(
        """
        a = f bytes=8 ns=4
        y = f(a) bytes=1 ns=30
        f = f(a) bytes=1 ns=30
        g = f(f) bytes=1 ns=30
        """,
        hand_machine(TWO),
    )
    etf = place(problem, MEtf(coplace=False), Budget(evaluations=1))
    sct = place(problem, MSct(coplace=False), Budget(evaluations=1))
    assert placed(etf) == {"a": "gpu:0", "y": "gpu:0", "f": "gpu:1", "g": "gpu:1"}
    assert etf.step_ns == 72
    assert placed(sct) == {"a": "gpu:0", "y": "gpu:1", "f": "gpu:0", "g": "gpu:0"}
    assert sct.step_ns == 64


WAITING = """
a = f bytes=8 ns=4
b = f bytes=2 ns=1
y = f(a) bytes=1 ns=30
f = f(a, b) bytes=1 ns=30
g = f(f) bytes=1 ns=30
"""
PINS = {"a": "gpu:0", "b": "gpu:1"}


def waiting(text: str, placer: MEtf | MSct) -> dict[str, str]:
    """Placed where gpu:1 sends slowly: b's 2 bytes are on gpu:0 at 9, a's 8 on gpu:1 at 12."""
    machine = hand_machine(TWO, slow={("gpu:1", "gpu:0"): 0.25})
    return placed(place(hand_problem(text, machine, pins=PINS), placer, Budget(evaluations=1)))


def test_a_device_waits_for_the_favourite_child() -> None:
    """gpu:0 is free at 4 and y could start, but its input is on both devices only at 12: gpu:0
    waits for f, the favourite of a, until 9."""
    assert waiting(WAITING, MEtf(coplace=False))["y"] == "gpu:0"
    found = waiting(WAITING, MSct(coplace=False))
    assert (found["f"], found["g"], found["y"]) == ("gpu:0", "gpu:0", "gpu:1")


def test_an_urgent_op_may_run_meanwhile() -> None:
    """p starts on gpu:1 at 1. q needs nothing either; both devices are free for it at 7, before
    f can start on gpu:0 at 9, so it takes the waiting gpu:0. With p of 9 ns it is urgent only at
    10: gpu:0 runs f first, and q goes to gpu:1."""
    text = WAITING + "p = f bytes=1 ns={}\nq = f bytes=1 ns=5\n"
    found = waiting(text.format(6), MSct(coplace=False))
    assert (found["p"], found["q"]) == ("gpu:1", "gpu:0")
    found = waiting(text.format(9), MSct(coplace=False))
    assert (found["p"], found["q"], found["f"]) == ("gpu:1", "gpu:1", "gpu:0")


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without HiGHS the reason names the package and the extra."""
    problem = hand_problem("a = f ns=1", hand_machine(TWO))
    assert MSct().supports(problem) == ""
    monkeypatch.setattr("devplace.placers.extras.find_spec", lambda name: None)
    assert MSct().supports(problem) == "needs highspy: pip install 'devplace[lp]'"
