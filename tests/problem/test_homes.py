"""Weights that stay where another plan has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from devplace.errors import ProblemError
from devplace.problem import Problem
from devplace.testing import hand_machine, hand_problem

TEXT = """
    x = input bytes=4
    w = parameter bytes=30 module=a
    f = parameter bytes=20 module=b
    y = aten.mm(x, w) bytes=8 ns=5 module=a
    z = aten.mm(y, f) bytes=8 ns=5 module=b result=output
    w2 = aten.sgd(w, y) bytes=30 ns=1 module=a replaces=w
"""
MACHINE = {"cuda:0": 1000, "cuda:1": 2000, "cpu:0": 5000}


def make(text: str = TEXT, unsupported: Any = None, **demands: Any) -> Problem:
    return hand_problem(text, hand_machine(MACHINE, unsupported=unsupported), **demands)


def allowed(problem: Problem, name: str) -> set[str]:
    """Devices an op may go to."""
    tasks = problem.core.tasks
    group = tasks.group[tasks.op_task[problem.graph.op_index[name]]]
    names = problem.machine.device_names
    return {names[d] for d in np.flatnonzero(problem.allowed[group])}


EVERYWHERE = set(MACHINE)


def test_a_trained_weight_and_its_update_stay_and_its_readers_are_free() -> None:
    """Only what is colocated with the weight is bound."""
    problem = make(homes={"w": "cuda:1"})
    assert allowed(problem, "w") == allowed(problem, "w2") == {"cuda:1"}
    assert allowed(problem, "y") == allowed(problem, "z") == EVERYWHERE


def test_a_fixed_weight_binds_what_reads_it() -> None:
    """It has no place of its own: it sits with its first reader."""
    problem = make(homes={"f": "cuda:1"})
    assert allowed(problem, "z") == {"cuda:1"}
    assert allowed(problem, "y") == allowed(problem, "w") == EVERYWHERE
    assert len(problem.pinned_groups) == 1


def test_a_home_that_cannot_be_gives_way() -> None:
    """To pins, and to devices that cannot run an op; names that the graph lacks do nothing."""
    pinned = make(homes={"w": "cuda:1"}, pins={"w": "cuda:0"})
    assert allowed(pinned, "w") == {"cuda:0"}
    unable = make(homes={"w": "cuda:1", "gone": "cuda:0"}, unsupported={"cuda:1": ["aten.sgd"]})
    assert allowed(unable, "w") == {"cuda:0", "cpu:0"}
    left_out = make(homes={"w": "cuda:1"}, exclude=["cuda:1"])
    assert allowed(left_out, "w") == {"cuda:0", "cpu:0"}


def test_of_several_homes_of_a_group_that_with_the_most_bytes_counts() -> None:
    """A weight of 30 bytes wins over its momentum of 20, in whatever order they are given."""
    text = """
        x = input bytes=4
        w = parameter bytes=30 module=a
        m[w] = state bytes=20 module=a
        y = aten.mm(x, w) bytes=8 ns=5 module=a result=output
        m2 = aten.add(m[w], y) bytes=20 ns=1 module=a replaces=m[w]
        w2 = aten.sgd(w, m2) bytes=30 ns=1 module=a replaces=w
    """
    for homes in ({"m[w]": "cuda:0", "w": "cuda:1"}, {"w": "cuda:1", "m[w]": "cuda:0"}):
        problem = make(text, homes=homes)
        assert allowed(problem, "w") == allowed(problem, "m[w]") == {"cuda:1"}


def test_an_unknown_device_is_refused() -> None:
    """As of pins."""
    with pytest.raises(ProblemError, match="home of 'w'"):
        make(homes={"w": "cuda:7"})
