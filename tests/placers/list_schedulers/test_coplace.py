"""Which ops are kept together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import random_problem

from devplace.placers.list_schedulers.coplace import coplaced
from devplace.testing import hand_machine, hand_problem

TWO = {"gpu:0": 100, "gpu:1": 100}


def units(text: str, **demands: object) -> list[set[str]]:
    problem = hand_problem(text, hand_machine(TWO), **demands)
    found: dict[int, set[str]] = {}
    tasks = problem.core.tasks
    for op, unit in zip(tasks.task_op, coplaced(problem), strict=True):
        found.setdefault(int(unit), set()).add(problem.graph.ops[op].name)
    return sorted(found.values(), key=sorted)


def test_an_op_joins_its_only_forward_reader() -> None:
    """a has two readers and stays; b and c each have one, d, and join it."""
    found = units(
        """
        a = f ns=1
        b = f(a) ns=1
        c = f(a) ns=1
        d = f(b, c) ns=1
        """
    )
    assert found == [{"a"}, {"b", "c", "d"}]


def test_backward_ops_sit_with_their_forward_op() -> None:
    """A backward reader does not count as a reader, and joins the forward ops of its call."""
    found = units(
        """
        a = f ns=1 module=l.0
        b = f(a) ns=1 module=l.1
        c = f(a, b) ns=1 module=l.1
        gb = f(c, b) ns=1 module=l.1 stage=backward
        ga = f(gb, a) ns=1 module=l.0 stage=backward
        """
    )
    assert found == [{"a", "ga"}, {"b", "c", "gb"}]


def test_pins_keep_ops_apart() -> None:
    """Ops pinned to different devices are not joined."""
    found = units("a = f ns=1\nb = f(a) ns=1", pins={"a": "gpu:0", "b": "gpu:1"})
    assert found == [{"a"}, {"b"}]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_units_are_unions_of_groups_that_some_device_can_run(seed: int) -> None:
    """No colocation group is torn apart, and a common device is left to every unit."""
    problem = random_problem(seed)
    tasks, unit = problem.core.tasks, coplaced(problem)
    for group in range(tasks.num_groups):
        assert len(set(unit[tasks.group == group])) == 1
    for number in set(unit.tolist()):
        assert problem.allowed[np.unique(tasks.group[unit == number])].all(axis=0).any()
