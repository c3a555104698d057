"""Modules in forward order."""

from __future__ import annotations

import numpy as np
from tests.fused_steps import LAYERS, fusible

from devplace.cost import CostTable
from devplace.graph import OpGraph
from devplace.graph.fusion import fuse
from devplace.placers.modules import module_chain
from devplace.problem import Problem
from devplace.testing import hand_machine


def problem(graph: OpGraph) -> Problem:
    """Every op takes 12 ns on the only device."""
    times = [[0 if op.is_source or op.is_view else 12] for op in graph.ops]
    costs = CostTable(np.array(times, np.int64), "hand")
    return Problem(graph, hand_machine({"gpu:0": 10**6}), costs)


def test_no_module_vanishes_from_the_chain_of_a_fused_step() -> None:
    """A module whose ops lie in the group of another one is named, and has no time of its own."""
    plain, fused = (
        module_chain(problem(fusible(LAYERS))),
        module_chain(problem(fuse(fusible(LAYERS)))),
    )
    assert plain.names == fused.names == ("one", "two", "three", "four")
    assert fused.time_ns.tolist() == [12, 12, 0, 12]


def test_a_group_of_a_container_belongs_to_its_largest_leaf() -> None:
    """If the op that stands for it is of no leaf module, the leaf that moves most bytes counts."""
    text = """
    x = input bytes=8
    h = mm(x) bytes=8 module=net.fc
    a = relu(h) bytes=9 module=net bytes_read=8 bytes_written=9
    b = mul(a) bytes=8 module=net.scale bytes_read=8 bytes_written=8
    y = mm(b) bytes=8 module=net.out result=output
    """
    chain = module_chain(problem(fuse(fusible(text))))
    assert chain.names == ("net.fc", "net.scale", "net.out")
    assert chain.time_ns.tolist() == [12, 12, 12]
