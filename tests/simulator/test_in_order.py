"""Simulation in a fixed order."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement

from devplace.problem import Problem
from devplace.schedule import waiting_ops
from devplace.simulator import simulate
from devplace.simulator.in_order import simulate_in_order
from devplace.testing import hand_machine, hand_placement, hand_problem, show


@settings(max_examples=150, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_a_simulated_order_gives_its_own_timeline(problem: Problem, seed: int) -> None:
    """The order that list simulation came to, held fixed, gives the same step to the byte."""
    placement = random_placement(problem, np.random.default_rng(seed))
    assume((problem.core.wires.streams == 1).all())
    free = simulate(problem, placement)
    assert waiting_ops(problem.graph, free.order) is None
    fixed = simulate_in_order(problem, placement, free.order)
    assert fixed.order == free.order
    np.testing.assert_array_equal(fixed.start_ns, free.start_ns)
    np.testing.assert_array_equal(fixed.finish_ns, free.finish_ns)
    np.testing.assert_array_equal(fixed.peak_bytes, free.peak_bytes)
    assert fixed.transfers == free.transfers


def test_an_op_waits_for_its_turn() -> None:
    """An order that puts a late op first keeps a ready one waiting."""
    problem = hand_problem(
        """
        a = f bytes=10 ns=5
        late = g(a) ns=3
        b = f ns=4
        """,
        hand_machine({"gpu:0": 99, "gpu:1": 99}),
    )
    placement = hand_placement(problem, {"late": "gpu:1", "b": "gpu:1"})
    assert show(simulate(problem, placement)) == (
        "gpu:0: a@0-5\ngpu:1: b@0-4 late@15-18\ngpu:0->gpu:1: a@5-15"
    )
    held = simulate_in_order(problem, placement, [[0], [1, 2]])
    assert show(held) == "gpu:0: a@0-5\ngpu:1: late@15-18 b@18-22\ngpu:0->gpu:1: a@5-15"
    assert held.peak_bytes.tolist() == [10, 11]


def test_ops_against_their_data_are_found() -> None:
    """Data one way and order the other way make a cycle: reader and read are named, not an op
    that only comes after them."""
    problem = hand_problem("z = f ns=1\na = f ns=1\nb = g(a) ns=1", hand_machine({"gpu:0": 9}))
    assert waiting_ops(problem.graph, [[0, 1, 2]]) is None
    assert waiting_ops(problem.graph, [[2, 1, 0]]) == (2, 1)


def test_a_cycle_over_two_devices_is_found() -> None:
    """Two devices that each wait for the other's second op never start."""
    problem = hand_problem(
        """
        a = f
        b = g(a)
        c = f
        d = g(c)
        """,
        hand_machine({"gpu:0": 9, "gpu:1": 9}),
    )
    assert waiting_ops(problem.graph, [[0, 3], [1, 2]]) is None
    assert waiting_ops(problem.graph, [[3, 0], [1, 2]]) in [(1, 0), (3, 2)]
