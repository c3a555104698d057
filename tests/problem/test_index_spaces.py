"""Ops, tasks and groups: what is known in one numbering, said in another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import problems

from devplace.problem import Problem
from devplace.testing import hand_machine, hand_problem


def small() -> Problem:
    """Tasks w, a, b and u; w and u are a group; x is read-only, v a view of a."""
    return hand_problem(
        """
        x = input bytes=4
        w = parameter bytes=4
        a = f(x, w) bytes=4 ns=1
        v = view(a) bytes=4
        b = f(v) bytes=4 ns=1
        u = sgd(w, b) bytes=4 ns=1 replaces=w
        """,
        hand_machine({"gpu:0": 99, "gpu:1": 99}),
    )


def test_devices_of_tasks_decide_those_of_all_ops() -> None:
    """The view goes with its base, the input to its first reader."""
    spaces = small().spaces
    assert spaces.op_devices(np.array([0, 1, 0, 0], np.int32)).tolist() == [1, 0, 1, 1, 0, 0]
    assert spaces.op_devices_of_groups(np.array([0, 1, 0], np.int32)).tolist() == [1, 0, 1, 1, 0, 0]


def test_values_go_from_one_numbering_to_another() -> None:
    """By hand: groups are (w, u), a and b."""
    spaces = small().spaces
    assert spaces.tasks_from_groups(np.array([7, 8, 9])).tolist() == [7, 8, 9, 7]
    assert spaces.tasks_from_groups(np.array([[7, 8, 9], [1, 2, 3]])).tolist() == [
        [7, 8, 9, 7],
        [1, 2, 3, 1],
    ]
    assert spaces.groups_from_tasks(np.array([5, 6, 7, 8])).tolist() == [5, 6, 7]
    assert spaces.groups_sum(np.array([5, 6, 7, 8])).tolist() == [13, 6, 7]
    assert spaces.tasks_from_ops(np.array([0, 1, 2, 3, 4, 5])).tolist() == [1, 2, 4, 5]
    assert spaces.ops_from_tasks(np.array([5, 6, 7, 8])).tolist() == [0, 5, 6, 0, 7, 8]
    assert spaces.tasks_of((4, 3, 2)).tolist() == [2, 1, 1]


def test_orders_leave_sources_out() -> None:
    """Tasks in order, each on its device, by the numbers of their ops."""
    found = small().spaces.order_of([0, 2, 1, 3], np.array([0, 1, 0, 0], np.int32), 2)
    assert found == ((4, 5), (2,))


@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_there_and_back_changes_nothing(problem: Problem, seed: int) -> None:
    """Groups to tasks to groups, and tasks to ops to tasks, on random problems."""
    spaces, rng = problem.spaces, np.random.default_rng(seed)
    groups = rng.integers(0, 9, problem.core.tasks.num_groups)
    tasks = rng.integers(0, 9, problem.core.tasks.num_tasks)
    assert (spaces.groups_from_tasks(spaces.tasks_from_groups(groups)) == groups).all()
    assert (spaces.tasks_from_ops(spaces.ops_from_tasks(tasks)) == tasks).all()
    devices = tasks.astype(np.int32)
    assert (spaces.tasks_from_ops(spaces.op_devices(devices)) == devices).all()
