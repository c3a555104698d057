"""The max-load problem and its exact evaluation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipelining.tiny import random_problem, slow_loads

from devplace.errors import ProblemError
from devplace.pipelining import LoadProblem, broken_rule, held_bytes, loads


def chain(**changes) -> LoadProblem:
    """Three nodes in a row, two accelerators and a CPU."""
    fields = dict(
        accelerator_ps=[10, 20, 30],
        cpu_ps=[100, 200, 300],
        can_accelerate=[True, True, True],
        size_bytes=[1, 2, 3],
        edge_src=[0, 1, 0],
        edge_dst=[1, 2, 2],
        edge_ps=[5, 7, 5],
        color=[-1, -1, -1],
        is_backward=[False, False, False],
        num_accelerators=2,
        num_cpus=1,
        memory_bytes=5,
    )
    return LoadProblem(**{**fields, **changes})


def test_loads_of_a_chain_worked_by_hand():
    """Producers pay once for all their consumers elsewhere, consumers once for each producer."""
    problem = chain()
    assert loads(problem, [0, 0, 1]).tolist() == [10 + 20 + 5 + 7, 30 + 5 + 7, 0]
    assert loads(problem, [0, 1, 1]).tolist() == [10 + 5, 20 + 30 + 5, 0]
    assert loads(problem, [0, 2, 0]).tolist() == [10 + 30 + 5 + 7, 0, 200]
    assert loads(problem, [2, 2, 2]).tolist() == [0, 0, 600]


@given(st.integers(0, 2**32 - 1))
def test_loads_equal_the_definition(seed):
    """The fast loads equal sums over own and outside nodes, one device at a time."""
    problem = random_problem(seed)
    device = np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_nodes)
    assert loads(problem, device).tolist() == slow_loads(problem, device)


def test_each_rule_is_named_when_broken():
    """The first broken rule is told with node, class or device and the limit."""
    assert broken_rule(chain(), [0, 0, 1]) == ""
    assert "accelerator 0 holds 6 B but has 5 B" in broken_rule(chain(), [0, 0, 0])
    assert broken_rule(chain(), [2, 2, 2]) == ""
    assert "class 4" in broken_rule(chain(color=[4, -1, 4]), [0, 0, 1])
    assert "node 1 runs on CPUs only" in broken_rule(
        chain(can_accelerate=[True, False, True]), [0, 0, 1]
    )
    assert held_bytes(chain(), [0, 0, 1]).tolist() == [3, 3, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_ps": [5, 7, 6]}, "node 0 has edges of"),
        ({"cpu_ps": [1, 2]}, r"cpu_ps must have shape \(3,\)"),
        ({"size_bytes": [1, -2, 3]}, r"size_bytes\[1\] must not be negative, got -2"),
        ({"edge_dst": [1, 2, 3]}, "edge_dst must name nodes 0 to 2"),
        ({"num_accelerators": 0, "num_cpus": 0}, "needs a device"),
        ({"memory_bytes": -1}, "memory_bytes must be at least 0, got -1"),
        ({"accelerator_ps": [2**60, 1, 1]}, "must sum to less than"),
    ],
)
def test_malformed_problems_are_refused(changes, message):
    """Each malformed field is named with its value."""
    with pytest.raises(ProblemError, match=message):
        chain(**changes)


@pytest.mark.parametrize("device", [[0, 1], [0, 1, 3], [0, -1, 2]])
def test_placements_out_of_range_are_refused(device):
    """A placement of the wrong length or with an unknown device is not evaluated."""
    with pytest.raises(ProblemError, match="A placement must"):
        loads(chain(), device)
