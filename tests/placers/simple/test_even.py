"""Even splits."""

from __future__ import annotations

import numpy as np
from tests.placers.helpers import placed

from devplace.placers import Budget, Even, Topo, place
from devplace.placers.simple.even import shares
from devplace.testing import hand_machine, hand_problem

TEXT = """
    x = input bytes=0
    a = f(x) bytes=0 ns=10 module=l.0
    b = f(a) bytes=0 ns=10 module=l.1
    c = f(b) bytes=0 ns=10 module=l.2
    d = f(c) bytes=0 ns=10 module=l.3
    db = g(d) bytes=0 ns=10 stage=backward module=l.3
    cb = g(db) bytes=0 ns=10 stage=backward module=l.2
    bb = g(cb) bytes=0 ns=10 stage=backward module=l.1
    ab = g(bb) bytes=0 ns=10 stage=backward module=l.0
"""
MACHINE = hand_machine({"gpu:0": 100, "gpu:1": 100, "cpu:0": 100})


def test_modules_are_shared_out_in_forward_order() -> None:
    """Half of the modules on each accelerator, backward with forward; the CPU gets none."""
    found = placed(place(hand_problem(TEXT, MACHINE), Even(), Budget(evaluations=1)))
    groups = {device: {k for k, v in found.items() if v == device and k != "x"} for device in
              ("gpu:0", "gpu:1")}  # fmt: skip
    assert groups == {"gpu:0": {"a", "b", "bb", "ab"}, "gpu:1": {"c", "d", "db", "cb"}}


def test_topo_shares_out_ops_in_graph_order() -> None:
    """The first half of the work on one accelerator, the rest on the next."""
    found = placed(place(hand_problem(TEXT, MACHINE), Topo(), Budget(evaluations=1)))
    assert {k for k, v in found.items() if v == "gpu:1"} == {"db", "cb", "bb", "ab"}


def test_excluded_devices_get_no_share() -> None:
    """Only usable devices take part."""
    problem = hand_problem(TEXT, MACHINE, exclude=["gpu:0"])
    found = placed(place(problem, Even(), Budget(evaluations=1)))
    assert set(found.values()) == {"gpu:1"}


def test_shares_are_runs_of_about_equal_weight() -> None:
    """Runs are in order, cover all, and none is empty when items are alike."""
    assert shares(np.ones(6), 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert shares(np.array([9.0, 1, 1, 1]), 2).tolist() == [0, 1, 1, 1]
    assert shares(np.zeros(4), 2).tolist() == [0, 0, 1, 1]
    assert shares(np.zeros(0), 2).tolist() == []
