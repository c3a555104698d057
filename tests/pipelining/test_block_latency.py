"""Block latency of one sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipelining.test_load_problem import chain
from tests.pipelining.tiny import native, placements, random_block_problem

from devplace.errors import ProblemError
from devplace.pipelining import BlockProblem, block_latency, broken_rule, pieces, solve_latency
from devplace.pipelining.block_latency import make_block_graph
from devplace.pipelining.native import solvers_module
from devplace.pipelining.solve_latency import latency_bound

SEEDS = st.integers(0, 2**32 - 1)


def block(**changes) -> BlockProblem:
    """The chain of the other tests: a feeds b and c, b feeds c."""
    problem = chain(**changes)
    return BlockProblem(**{name: getattr(problem, name) for name in problem.__dataclass_fields__})


def test_latencies_of_a_chain_worked_by_hand():
    """A block takes its inputs, its work and its outputs; the CPU only works."""
    assert block_latency(block(), [0, 0, 0]) == 60
    assert block_latency(block(), [0, 0, 1]) == (10 + 20 + 5 + 7) + (5 + 7 + 30)
    assert block_latency(block(), [2, 2, 2]) == 600
    assert block_latency(block(), [0, 2, 2]) == 10 + 5 + 200 + 300


def test_a_share_that_is_left_and_entered_again_is_two_pieces():
    """a and c on one accelerator with b elsewhere: c waits for b, and pays for a once more."""
    assert pieces(block(), [0, 1, 0]).tolist() == [0, 0, 1]
    assert block_latency(block(), [0, 1, 0]) == (10 + 5) + (5 + 20 + 7) + (5 + 7 + 30)


def test_pieces_that_wait_for_each_other_have_no_latency():
    """Two contiguous shares, each of which feeds the other, never start."""
    crossed = BlockProblem(
        accelerator_ps=[1, 1, 1, 1],
        cpu_ps=[1, 1, 1, 1],
        can_accelerate=[True] * 4,
        size_bytes=[0] * 4,
        edge_src=[0, 2],
        edge_dst=[1, 3],
        edge_ps=[1, 1],
        color=[-1] * 4,
        is_backward=[False] * 4,
        num_accelerators=2,
        num_cpus=1,
        memory_bytes=0,
    )
    assert block_latency(crossed, [0, 1, 1, 0]) is None
    assert block_latency(crossed, [0, 0, 1, 1]) == 2


@settings(max_examples=100)
@given(SEEDS)
def test_native_latency_equals_the_plain_one(seed):
    """Both forms give the same latency, or none, for any placement."""
    problem = random_block_problem(seed)
    module = solvers_module()
    if module is None:
        pytest.skip("needs the native module")
    most = problem.num_accelerators + int(problem.num_cpus > 0)
    device = np.random.default_rng(seed).integers(0, most, problem.num_nodes).astype(np.int32)
    latency = module.block_latency(make_block_graph(problem), device)
    assert latency == (-1 if (slow := block_latency(problem, device)) is None else slow)


def _best(problem: BlockProblem) -> int | None:
    values = (block_latency(problem, device) for device in placements(problem))
    return min((value for value in values if value is not None), default=None)


@settings(max_examples=40)
@given(SEEDS)
def test_search_equals_brute_force_and_bound_is_below(seed):
    """The search finds the smallest latency of tiny problems within memory."""
    problem = random_block_problem(seed)
    best = _best(problem)
    solution = solve_latency(problem, seed=seed, threads=1, max_evaluations=20_000)
    assert solution.value_ps == best
    if best is not None:
        assert latency_bound(problem, 1.0) <= best
        assert broken_rule(problem, solution.device) == ""
        assert block_latency(problem, solution.device) == best


@settings(max_examples=8)
@given(SEEDS)
def test_plain_search_keeps_to_memory(seed):
    """The plain Python search gives valid placements, at most as good as brute force."""
    problem = random_block_problem(seed)
    best = _best(problem)
    with native(False):
        solution = solve_latency(problem, seed=seed, threads=1, max_evaluations=300)
    if solution.value_ps is not None:
        assert best is not None
        assert solution.value_ps >= best
        assert broken_rule(problem, solution.device) == ""


def test_backward_nodes_and_cycles_are_refused():
    """Latency of one sample is for inference graphs without cycles."""
    with pytest.raises(ProblemError, match="node 1 is a backward node"):
        block(is_backward=[False, True, False])
    with pytest.raises(ProblemError, match="without cycles"):
        block(edge_src=[0, 1, 2], edge_dst=[1, 2, 1], edge_ps=[5, 7, 9])


def test_what_cannot_fit_is_infeasible():
    """The sums that show it are told."""
    solution = solve_latency(block(num_cpus=0, memory_bytes=2), seconds=1)
    assert solution.status == "infeasible"
    assert "all nodes hold 6 B" in solution.how


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("most", [0, 1, 2, 10, 700])
def test_no_more_moves_are_tried_than_allowed(most, is_native):
    """In all, not by each thread; with and without a limit of time beside it."""
    for seed in range(20):
        for seconds in (None, 20.0):
            with native(is_native):
                found = solve_latency(
                    random_block_problem(seed), seconds, seed, threads=3, max_evaluations=most
                )
            assert found.evaluations <= most
