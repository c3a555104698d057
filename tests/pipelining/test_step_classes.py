"""Classes of ops that share a device in a pipeline."""

from __future__ import annotations

import numpy as np
from tests.fused_steps import fusible

from devplace.cost import CostTable
from devplace.graph import OpGraph
from devplace.graph.fusion import fuse
from devplace.pipelining.step_classes import step_classes
from devplace.problem import Problem
from devplace.testing import hand_machine

BOTH_WAYS = """
x = input bytes=8
h = mm(x) bytes=8 module=one
a = relu(h) bytes=9 module=two
b = mul(a) bytes=8 module=three
y = mm(b) bytes=8 module=four
g = mm(y) bytes=8 module=four stage=backward
c = mul(g) bytes=8 module=three stage=backward
d = add(c) bytes=7 module=extra stage=backward
e = mm(d) bytes=8 module=one stage=backward
f = mm(c) bytes=8 module=one stage=backward result=output
k = mm(e) bytes=8 module=one stage=backward result=output
"""


def classes(graph: OpGraph) -> dict[str, int]:
    """Class of each task by name, on two devices."""
    machine = hand_machine({"gpu:0": 10**6, "gpu:1": 10**6})
    problem = Problem(graph, machine, CostTable(np.zeros((len(graph.ops), 2), np.int64), "hand"))
    found = step_classes(problem).tolist()
    return {graph.ops[op].name: found[task] for task, op in enumerate(problem.core.tasks.task_op)}


def test_backward_groups_sit_with_the_forward_group_of_their_module() -> None:
    """The module of the backward group's op is a member of the forward group, for which another
    module's op stands."""
    found = classes(fuse(fusible(BOTH_WAYS)))
    assert {"fused_a", "fused_c"} <= found.keys()
    assert found["fused_c"] == found["fused_a"]
    assert found["g"] == found["y"]
    assert found["h"] == found["e"] == found["f"] == found["k"]
    assert len({found["h"], found["fused_a"], found["y"]}) == 3


def test_a_group_of_both_passes_is_not_its_own_forward_op() -> None:
    """A group that holds forward and backward members stays apart from other modules' ops."""
    text = """
    x = input bytes=8
    h = mm(x) bytes=8 module=one
    a = relu(h) bytes=8 module=loss
    b = mul(a) bytes=9 module=loss stage=backward
    e = mm(b) bytes=8 module=one stage=backward result=output
    """
    found = classes(fuse(fusible(text)))
    assert found["h"] == found["e"] != found["fused_b"]
